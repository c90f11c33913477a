"""Connections between workers: only pairs that a plan uses, kept across plans; a lost one is made again alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from refitd.testing import Daemon, Engine, eventually
from tests.support.names import policy

ESTABLISHED = "01"


def connections(n0: Daemon) -> dict[frozenset[str], set[int]]:
    """Return, for each pair of nodes whose workers are connected, the other ends' ports: new ones are new."""
    doors = {lane.port: node.node for node in n0.status().nodes for lane in node.lanes}
    ends = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [(int(here[-4:], 16), int(there[-4:], 16)) for here, there, state in ends if state == ESTABLISHED]
    holders = {}
    for node in n0.status().nodes:
        for pid in node.workers:
            for port in ports_of(pid):
                holders[port] = node.node
    found: dict[frozenset[str], set[int]] = {}
    for here, there in ports:
        if here in doors and there in holders:
            found.setdefault(frozenset({doors[here], holders[there]}), set()).add(there)
    return found


def ports_of(pid: int) -> set[int]:
    """Return the local ports of a process's connections."""
    sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(line[1][-4:], 16) for line in lines if f"socket:[{line[9]}]" in sockets}


def test_only_pairs_that_exchange_connect_and_only_those_of_a_dead_worker_connect_again(
    nodes: Callable[..., tuple[Daemon, ...]],
) -> None:
    """Rank 0 crosses from n0 to n1, rank 1 from n2 to n3."""
    n0, n1, n2, n3 = nodes(4)
    pairs = frozenset({"n0", "n1"}), frozenset({"n2", "n3"})
    with n0.connect() as c0, n1.connect() as c1, n2.connect() as c2, n3.connect() as c3:
        full = [{f"w{rank}": torch.zeros(1000, 300)} for rank in range(2)]
        sources = [c.register_source(policy(), full[rank], rank=rank, world_size=2) for rank, c in enumerate((c0, c2))]
        version = 0

        def replica(name: str) -> list[tuple[object, dict[str, torch.Tensor]]]:
            made = []
            for rank, client in enumerate((c1, c3)):
                mine = {f"w{rank}": torch.zeros(1000, 300)}
                target = client.register_target(policy(), mine, replica=name, rank=rank, world_size=2)
                made.append((target, mine))
            return made

        def swap(*replicas: list[tuple[object, dict[str, torch.Tensor]]]) -> dict[frozenset[str], set[int]]:
            nonlocal version
            version += 1
            for rank, source in enumerate(sources):
                full[rank][f"w{rank}"].fill_(10 * version + rank)
                source.publish(version)
            assert c0.swap(policy(), version, timeout=90).outcome == "committed"
            for made in replicas:
                for rank, (_, mine) in enumerate(made):
                    assert torch.equal(mine[f"w{rank}"], full[rank][f"w{rank}"])
            return connections(n0)

        first, second = replica("a"), []
        with Engine(*(target for target, _ in first)):
            before = swap(first)
            assert set(before) == set(pairs) and all(len(ends) == 1 for ends in before.values())
            second = replica("b")  # another plan, and another epoch
            with Engine(*(target for target, _ in second)):
                # a swap would abort the catch-up, and an abort replaces workers that copy
                eventually(lambda: all(target.version == version for target, _ in second), "it has caught up")
                assert swap(first, second) == before
                (victim,) = n1.node_of("n1").workers
                os.kill(victim, signal.SIGKILL)
                eventually(lambda: n1.node_of("n1").workers not in ((victim,), (0,)), "another worker runs")
                after = swap(first, second)
                assert set(after) == set(pairs) and after[pairs[1]] == before[pairs[1]]
                assert len(after[pairs[0]]) == 1 and after[pairs[0]] != before[pairs[0]]
