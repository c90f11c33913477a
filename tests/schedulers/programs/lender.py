"""Lend a version of tensors in an arena, swap to it, and print how it travelled."""

import torch

import refitd

with refitd.connect(name="lender") as client:
    weights = client.allocate({"w": ((1 << 18,), torch.float32)})
    weights["w"].fill_(7.0)
    source = client.register_source("lent", weights)
    with source.lend(source.next_version):
        report = client.swap("lent", timeout=60)
    print(report.outcome, source.lending)
