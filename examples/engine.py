"""Serve one model and commit new weights between two steps. Start it before the trainer (fsdp2_trainer.py)."""

import argparse
import time

import torch
from fsdp2_trainer import build, fingerprint

import refitd


def main() -> None:
    """Serve until `--versions` versions are committed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replica", default="engine-0")
    parser.add_argument("--versions", type=int, default=5)
    options = parser.parse_args()
    model = build().requires_grad_(False)
    addresses = [tensor.data_ptr() for tensor in model.parameters()]

    with refitd.connect(name=options.replica) as client:
        target = client.register_target("policy", model, replica=options.replica)
        print(f"{options.replica}: registered", flush=True)
        taken = 0
        while taken < options.versions:
            if target.version is not None:  # None: no version yet, or it may be out of date
                model(torch.zeros(1, 32))
            time.sleep(0.005)  # a step's work
            if (version := target.poll()) is not None:  # a commit point; cheap without a new version
                taken += 1
                weights = fingerprint(dict(model.named_parameters()))
                print(f"{options.replica}: version {version} weights {weights}", flush=True)
        target.close()
    assert addresses == [tensor.data_ptr() for tensor in model.parameters()]


if __name__ == "__main__":
    main()
