"""Serve until the end, and print the versions; given a number, die at that version."""

import os
import signal
import sys
import time

import torch

import refitd

node = os.uname().nodename
weights = {"w": torch.zeros(1 << 10, 256)}
client = refitd.connect(name=node)
target = client.register_target("policy", weights, replica=node)
while True:
    if (version := target.poll()) is not None:
        if not torch.equal(weights["w"], torch.full_like(weights["w"], version)):
            sys.exit(f"{node}: version {version} is not what was published")
        print(f"{node} serves {version}", flush=True)
        if sys.argv[1:] == [f"{node}:{version}"]:
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
