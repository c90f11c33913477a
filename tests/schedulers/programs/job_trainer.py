"""Train as one of several ranks: publish versions, swap each into all engines, and check that they serve it."""

import os
import sys
import time

import torch

import refitd

rank, ranks = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_STEP_NUM_NODES"])
expected = set(sys.argv[1].split(","))  # replicas
versions = int(sys.argv[2])
rows = 1 << 10
weights = {"w": torch.zeros(rows // ranks, 256)}
split = [
    refitd.ParameterMetadata(
        name="w",
        shape=(rows // ranks, 256),
        dtype=torch.float32,
        element_size=4,
        is_tp=ranks > 1,
        partition_dim=0,
        owner_rank=rank,
        tensor_parallel_group_ranks=list(range(ranks)),
    )
]
with refitd.connect(name=f"trainer-{rank}") as client:
    source = client.register_source("policy", weights, metadata=split, rank=rank, world_size=ranks)
    deadline = time.monotonic() + 60
    while {target.replica for model in client.status().models for target in model.targets} != expected:
        if time.monotonic() > deadline:
            sys.exit(f"not all engines have registered: {client.status().models}")
        time.sleep(0.1)
    for version in range(1, versions + 1):
        weights["w"].fill_(version)
        source.publish(version)
        if rank == 0:
            report = client.swap("policy", version, wait=60, timeout=60)
            print(f"trainer: {report.outcome} {version} in {len(report.members)} engine ranks", flush=True)
        while any(model.live != version for model in client.status().models):
            time.sleep(0.05)
    print(f"trainer rank {rank} of {ranks} on {os.uname().nodename} has {len(client.status().nodes)} nodes", flush=True)
    if rank == 0:
        print(f"trainer: {client.verify('policy').outcome}", flush=True)
        if "fail" in sys.argv:
            sys.exit(7)
