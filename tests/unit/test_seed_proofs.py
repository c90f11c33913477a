"""A seed is compared, after peers have read it, with the digests from when its version went live."""

from __future__ import annotations

import pytest
import torch

from refitd.commit.target_state import StageBegan
from refitd.daemon import actions as act
from refitd.daemon.effects import Proven, SeedOf
from refitd.daemon.members import RankProofs
from refitd.protocol import sidecar
from tests.support.proofs import LIVE, STAGING, Node

SHAPES = [((300,), torch.uint8), ((7, 11), torch.bfloat16), ((5000,), torch.float32)]


def proven(node: Node, *tensors: str) -> list[str]:
    """Verify these tensors to the end; return the reported mismatches."""
    node.proofs.seeds.prove(node.out, node.member, tensors, SeedOf("s"))
    node.run()
    return told(node)


def told(node: Node) -> list[str]:
    """Return the mismatch of each check that ended since the last call; empty where all is equal."""
    notes = [note for note in node.out.notes if isinstance(note, Proven)]
    assert all((note.member, note.purpose) == (node.member.id, SeedOf("s")) for note in notes)
    node.out.notes.clear()
    return [note.wrong for note in notes]


@pytest.mark.parametrize("way", ["packed", "in-place"])
def test_what_changed_is_told_of_the_tensors_that_were_read(way: str) -> None:
    node = Node(SHAPES, way, 1)
    node.proofs.committed(node.out, node.member)
    node.tick()
    node.run()
    assert node.member.seeds and proven(node, *node.names) == [""]
    # in place the live tensors are read, otherwise the staging arena
    spoilt = node.live[0].numpy() if way == "in-place" else node.staging.bytes
    spoilt[3] ^= 1
    (wrong,) = proven(node, "t0", "t1")
    assert wrong == "t0: its memory has changed since version 7 went live"
    assert proven(node, "t1", "t2") == [""]
    assert proven(node) == [""], "nothing was read of it"


def test_a_staging_arena_without_digests_yet_is_what_only_workers_have_written() -> None:
    node = Node(SHAPES, "packed", 1)
    assert node.member.proofs.live is None and proven(node, "t0") == [""]


def test_live_tensors_without_digests_seed_nobody_and_digests_under_way_are_waited_for() -> None:
    node = Node(SHAPES, "in-place", 1)
    node.member.proofs = RankProofs()
    assert proven(node, "t0") == ["the digest of version 7 could not be taken when it went live"]
    node.proofs.committed(node.out, node.member)  # it begins to digest immediately
    node.proofs.seeds.prove(node.out, node.member, node.names, SeedOf("s"))
    assert not told(node)
    node.run()
    assert told(node) == [""]


def test_a_version_that_is_staged_over_or_cannot_be_read_is_told() -> None:
    node = Node(SHAPES, "packed", 1)
    node.proofs.committed(node.out, node.member)
    node.tick()
    node.run()
    node.proofs.seeds.prove(node.out, node.member, node.names, SeedOf("s"))
    node.out.move(node.member, StageBegan("s", 8))
    assert node.member.offered(7, "") is None
    node.run()
    assert told(node) == ["it serves version 7 no longer"]
    node = Node(SHAPES, "packed", 1)
    node.proofs.committed(node.out, node.member)
    node.tick()
    node.run()
    del node.arenas[STAGING]
    assert "arena 1 is not mapped" in proven(node, "t0")[0]


def test_a_seed_is_proven_while_a_swap_runs_by_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd.buffers.layout.MIN_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr("refitd.daemon.digest_work.RUN_BYTES", 64 << 10)
    node = Node([((60 << 10,), torch.uint8)] * 3, "packed", 1)
    node.proofs.committed(node.out, node.member)
    node.tick()
    node.run()
    node.is_swapping = True
    node.proofs.seeds.prove(node.out, node.member, node.names, SeedOf("s"))
    node.dispatch()
    asked = [do for do in node.out if isinstance(do, act.ToWorker) and isinstance(do.message, sidecar.ReadSpans)]
    assert [do.worker for do in asked] == [0, 1]
    assert LIVE not in node.arenas
