"""Services are created and closed repeatedly, and leave nothing behind in their processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from refitd.testing.conformance.contestants import Contestant
from refitd.testing.conformance.transfers import Layout, Maker
from refitd.testing.conformance.world import World

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
