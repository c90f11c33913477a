"""Serve two models, one published and one lent, and print each version after checking its tensors."""

import sys
import time

import torch

import refitd

weights = {"w": torch.zeros(1 << 20), "b": torch.zeros(37, dtype=torch.bfloat16)}
client = refitd.connect(name="engine")
target = client.register_target("policy", weights, replica="a")
lent = {"w": torch.zeros(1 << 18)}
other = client.register_target("lent", lent, replica="a")
print("registered", file=sys.stderr, flush=True)
while True:
    if (version := target.poll()) is not None:
        if not all(torch.equal(tensor, torch.full_like(tensor, version % 100)) for tensor in weights.values()):
            sys.exit(f"version {version} is not what was published")
        print(f"serves {version}", file=sys.stderr, flush=True)
    if (version := other.poll()) is not None:
        print(f"lent {version} {float(lent['w'].mean())}", file=sys.stderr, flush=True)
    time.sleep(0.01)
