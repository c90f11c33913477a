"""Services have their declared capabilities; created and closed repeatedly, they leave no descriptors or threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from refitd.copy_services.registry import ENTRY_POINTS
from refitd.testing.conformance.transfers import TIMEOUT_S, Layout, Maker, Plan
from refitd.testing.conformance.world import Contestant, World, contestants


@pytest.mark.parametrize("contestant", contestants(), ids=str)
def test_every_installed_service_is_tested_here(contestant: Contestant) -> None:
    """Report the services that cannot run and what they lack; other tests of this folder omit them."""
    if missing := contestant.missing():
        pytest.skip(f"{contestant}: {missing}")


MODULE = """
from refitd.copy_services import Backend
from refitd.copy_services.shm import SharedMemoryService

class CopyCat(SharedMemoryService):
    name = "copycat"

BACKEND = Backend("copycat", CopyCat.capabilities, lambda: "", mapped=CopyCat)
"""


def test_a_service_of_another_package_is_tested_without_being_named_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: Callable[..., World]
) -> None:
    (tmp_path / "copy_cat.py").write_text(MODULE)
    info = tmp_path / "copy_cat-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: copy-cat\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ncopycat = copy_cat:BACKEND\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = (contestant for contestant in contestants() if contestant.backend == "copycat")
    assert not found.missing()
    world = fresh(found)
    world.join()
    maker = Maker()
    maker.add(0, 1, (100, 30), "float32", read=Layout((1, 0)))

    assert world.run(maker.plan()).arrived


def test_sides_and_nodes_are_told_truthfully(contestant: Contestant) -> None:
    backend = contestant.found()

    assert (backend.mapped is not None) == contestant.capabilities.is_one_sided
    assert (backend.join is not None) == contestant.capabilities.crosses_nodes


def test_only_a_service_that_needs_contiguous_tensors_packs_strided_ones(world: World) -> None:
    def staging_of(layout: Layout) -> int:
        world.leave()  # buffers are kept between runs
        assert {answer.error for answer in world.join().values()} == {""}
        maker = Maker()
        maker.add(0, 1, (300, 900), "float32", read=layout, write=layout)
        outcome = world.run(maker.plan())
        assert outcome.arrived, outcome.answers
        return max(answer.staging_bytes for answer in outcome.answers.values())

    strided = staging_of(Layout(gap=3))
    assert (strided > 0) == world.contestant.capabilities.needs_contiguous


def test_no_message_is_longer_than_a_service_says(
    contestant: Contestant, fresh: Callable[..., World], request: pytest.FixtureRequest
) -> None:
    longest = contestant.capabilities.max_message_bytes
    if longest is None:
        pytest.skip(f"{contestant} sets no limit")
    size = 2 * longest + 12_345
    maker = Maker()
    maker.add(0, 1, (size,))
    plan = Plan(maker.plan().transfers, size + 4096)
    world = fresh(contestant, 2, room=plan.room)
    world.join(staging=dict.fromkeys(world.runners, 64 * longest), timeout=TIMEOUT_S)
    outcome = world.run(plan)

    assert outcome.arrived, outcome.answers
    assert min(answer.messages for answer in outcome.answers.values()) == 3


# a service that stayed would keep its staging buffers, more than this in ten epochs
GROWTH_BYTES = 8 << 20  # the allocator keeps a buffer or two of 3 MB; ten epochs that kept theirs would hold ten


def test_ten_epochs_leave_no_descriptor_no_thread_and_no_memory_behind(
    contestant: Contestant, fresh: Callable[..., World]
) -> None:
    world = fresh(contestant)
    maker = Maker()
    for source, target in itertools.product(range(3), repeat=2):
        maker.add(source, target, (601, 499), write=Layout(gap=1))
    plan = maker.plan()

    def epochs(count: int) -> None:
        for _ in range(count):
            assert {answer.error for answer in world.join().values()} == {""}
            assert world.run(plan).arrived
        world.leave()

    epochs(5)
    before = world.vitals()
    epochs(10)
    after = world.vitals()

    for process, was in before.items():
        now = after[process]
        assert now.descriptors == was.descriptors, f"process {process}: {was} -> {now}"
        assert now.threads == was.threads, f"process {process}: {was} -> {now}"
        assert now.resident_bytes < was.resident_bytes + GROWTH_BYTES, f"process {process}: {was} -> {now}"


def test_a_service_that_is_closed_is_no_longer_usable_and_the_next_one_is(world: World) -> None:
    """`leave` closes twice, which is allowed, and checks."""
    world.leave()
    maker = Maker()
    maker.add(0, 1, (1000,))
    assert {answer.error for answer in world.join().values()} == {""}

    assert world.run(maker.plan()).arrived


def test_an_epoch_of_one_moves_what_stays(contestant: Contestant, fresh: Callable[..., World]) -> None:
    world = fresh(contestant, 1)
    world.join()
    maker = Maker()
    maker.add(0, 0, (300_007,))
    maker.add(0, 0, (20, 30), "bfloat16", read=Layout((1, 0)))

    assert world.run(maker.plan()).arrived
