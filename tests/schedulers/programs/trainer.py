"""Publish a version every half second, until the end; each tensor is filled with its version."""

import sys
import time

import torch

import refitd

weights = {"w": torch.zeros(1 << 20), "b": torch.zeros(37, dtype=torch.bfloat16)}
client = refitd.connect(name="trainer")
source = client.register_source("policy", weights)
version = source.next_version
print("registered", file=sys.stderr, flush=True)
while True:
    for tensor in weights.values():
        tensor.fill_(version % 100)
    try:
        source.publish(version, timeout=120)
    except refitd.RefusedError:  # the live version has been counted on while this was away
        version = source.next_version
        continue
    except refitd.TransportError as error:  # the coordinator or the daemon is lost for longer than a call waits
        print(f"not published: {error}", file=sys.stderr, flush=True)
        time.sleep(0.5)
        continue
    version += 1
    time.sleep(0.5)
