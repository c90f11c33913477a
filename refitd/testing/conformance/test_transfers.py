"""Transfers, also those of random plans, write the sent bytes to their destination, and no other byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from refitd.testing.conformance.transfers import BLOCK_CASTS, CASTS, SIZES, Layout, Maker, Orders, Place, Plan
from refitd.testing.conformance.world import ROOM, STAGING_BYTES, Contestant, World

NOTHING = Plan((), 4096)
SIZES_IN_BYTES = (1, 2, 15, 16, 17, 255, 4097, 65521, 65536, 131071, 131072, 131073, 300_007)
LARGEST = STAGING_BYTES + 300_007


def bytes_between(source: int, target: int, *sizes: int) -> Plan:
    maker = Maker()
    for size in sizes:
        maker.add(source, target, (size,))
    return maker.plan()


def succeeded(world: World, plan: Plan, orders: Orders | None = None) -> bool:
    outcome = world.run(plan, orders)
    assert outcome.errors() == {""}, outcome.answers
    return outcome.arrived


def test_an_empty_plan_moves_nothing_and_succeeds(world: World) -> None:
    outcome = world.run(NOTHING)

    assert outcome.errors() == {""} and outcome.untouched
    assert all(a.received == a.local == 0 for a in outcome.answers.values())


def test_a_process_with_nothing_to_move_takes_part(world: World) -> None:
    assert succeeded(world, bytes_between(0, 1, 1000))
    assert succeeded(world, bytes_between(2, 2, 1000))


def test_a_tensor_without_elements_moves_nothing(world: World) -> None:
    maker = Maker()
    maker.add(0, 1, (0,), "float32")
    maker.add(1, 1, (3, 0, 5), "bfloat16")
    maker.add(1, 2, (7,))

    assert succeeded(world, maker.plan())


@pytest.mark.parametrize("size", SIZES_IN_BYTES)
def test_any_number_of_bytes_arrives(world: World, size: int) -> None:
    assert succeeded(world, bytes_between(0, 1, size))


def test_more_than_all_staging_arrives(world: World) -> None:
    maker = Maker()
    maker.add(0, 1, (LARGEST,))
    maker.add(1, 2, (3, LARGEST // 7), "bfloat16", write=Layout(gap=3))
    maker.add(2, 0, (LARGEST // 32, 2), "complex128", read=Layout((1, 0)))

    assert succeeded(world, maker.plan())


def test_sizes_of_all_kinds_share_a_plan_between_all_pairs(world: World) -> None:
    maker = Maker()
    for (source, target), size in zip(
        itertools.cycle(itertools.product(range(3), repeat=2)), SIZES_IN_BYTES + SIZES_IN_BYTES[::-1], strict=False
    ):
        maker.add(source, target, (size,))

    assert succeeded(world, maker.plan())


@pytest.mark.parametrize("dtype", SIZES)
def test_every_dtype_arrives_bit_for_bit(world: World, dtype: str) -> None:
    maker = Maker()
    for source, target in ((0, 1), (2, 0), (1, 1)):
        maker.add(source, target, (37, 5), dtype)
        maker.add(source, target, (5, 37), dtype, read=Layout((1, 0)))

    assert succeeded(world, maker.plan())


@pytest.mark.parametrize("pair", CASTS, ids="-to-".join)
def test_numbers_are_converted_to_the_nearest(world: World, pair: tuple[str, str]) -> None:
    if not world.contestant.converts:
        pytest.skip("conversions are for other services")
    maker = Maker()
    for source, target in ((0, 1), (1, 1), (1, 2)):
        maker.add(source, target, (), pair[1], cast_from=pair[0])
        maker.add(source, target, (53, 7), pair[1], cast_from=pair[0])
        maker.add(source, target, (7, 53), pair[1], cast_from=pair[0], read=Layout((1, 0)))
        maker.add(source, target, (40_001,), pair[1], cast_from=pair[0], write=Layout(spread=2))

    assert succeeded(world, maker.plan())


@pytest.mark.parametrize("pair", BLOCK_CASTS, ids="-to-".join)
def test_blocks_are_converted_as_receivers_convert_them(world: World, pair: tuple[str, str]) -> None:
    if world.contestant.device != "cpu":
        pytest.skip("this suite has no blocks on a device")
    maker = Maker()
    for source, target in ((0, 1), (1, 1), (1, 2)):
        maker.add(source, target, (53, 7), pair[1], cast_from=pair[0], read=Layout((1, 0), gap=1, skew=3))
        maker.add(source, target, (5_003,), pair[1], cast_from=pair[0], write=Layout(spread=2))

    assert succeeded(world, maker.plan())


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "complex128"])
def test_elements_may_lie_at_any_address(world: World, dtype: str) -> None:
    if not world.contestant.takes_any_address:
        pytest.skip("tensors on a device begin at multiples of their elements")
    maker = Maker()
    for skew in (1, 3, 7):
        maker.add(0, 1, (33, 9), dtype, read=Layout(skew=skew))
        maker.add(1, 2, (33, 9), dtype, write=Layout(skew=skew))
        maker.add(2, 2, (33, 9), dtype, read=Layout((1, 0), skew=skew), write=Layout(gap=1, skew=skew + 1))
        maker.add(2, 0, (11_001,), dtype, read=Layout(skew=skew), write=Layout(skew=skew + 2))

    assert succeeded(world, maker.plan())


LAYOUTS = (Layout(), Layout(gap=2), Layout((1, 0)), Layout((1, 0), gap=3, spread=2))


@pytest.mark.parametrize("target", [1, 0], ids=["remote", "local"])
@pytest.mark.parametrize(("read", "write"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_any_layout_is_read_into_any_other(world: World, target: int, read: Layout, write: Layout) -> None:
    maker = Maker()
    maker.add(0, target, (31, 17), "bfloat16", read=read, write=write)
    maker.add(0, target, (301, 211), "uint8", read=read, write=write)

    assert succeeded(world, maker.plan())


def test_boxes_of_many_dimensions_arrive(world: World) -> None:
    maker = Maker()
    for source, target in ((0, 2), (1, 1)):
        maker.add(source, target, (), "int64")
        maker.add(source, target, (2, 3, 4, 5), "float32", read=Layout((3, 1, 0, 2)), write=Layout(gap=1))
        maker.add(source, target, (1, 7, 1, 3), "bfloat16", write=Layout((3, 2, 1, 0)))
        maker.add(source, target, (5, 70, 300), "bfloat16", read=Layout((2, 0, 1)))

    assert succeeded(world, maker.plan())


def test_one_element_fills_a_box(world: World) -> None:
    maker = Maker()
    for target in (1, 0):
        maker.add(0, target, (700, 300), "bfloat16")
    plan = maker.plan()
    filling = tuple(replace(t, source=Place(0, 64, (0, 0))) for t in plan.transfers)

    assert succeeded(world, replace(plan, transfers=filling))


def test_neighbours_that_interleave_do_not_touch_each_other(world: World) -> None:
    """Two senders and the process itself fill every third column of one matrix."""
    maker = Maker()
    plan = Plan(
        tuple(
            replace(maker.add(source, 1, (200, 50), "float32"), target=Place(1, 4 * source, (600, 12)))
            for source in range(3)
        ),
        200 * 600,
    )

    assert succeeded(world, plan)


def test_sources_that_overlap_are_each_read(world: World) -> None:
    maker = Maker()
    plan = Plan(
        tuple(
            replace(maker.add(0, target, (64, 64), "bfloat16"), source=Place(0, 2 * target, (16, 4)))
            for target in (0, 1, 2)
        ),
        1 << 20,
    )

    assert succeeded(world, plan)


def test_parts_of_one_logical_transfer_arrive_in_their_own_tensors(world: World) -> None:
    """Equal sizes: only the part distinguishes them, and they are not noted in order."""
    maker = Maker()
    for part in (2, 0, 3, 1, 70_000):
        for source, target in ((0, 1), (1, 0), (2, 2)):
            maker.add(source, target, (999,), "bfloat16", task=2**62 + 1, part=part)
    plan = maker.plan()
    shuffled = replace(plan, transfers=tuple(sorted(plan.transfers, key=lambda t: (t.part * 7919) % 11)))

    assert succeeded(world, shuffled)


def test_each_end_names_its_transfers_in_an_order_of_its_own(world: World) -> None:
    maker = Maker()
    for task in (7, 3, 9, 1, 5):
        for source, target in ((0, 1), (2, 1), (1, 1)):
            maker.add(source, target, (500,), task=10 * task + source)
    plan = maker.plan()
    backwards = replace(plan, transfers=plan.transfers[::-1])
    outcome = world.run(plan, plan_of={1: backwards})

    assert outcome.errors() == {""} and outcome.arrived


def test_task_ids_may_be_any_number(world: World) -> None:
    maker = Maker()
    for task in (0, 1, 2**31, 2**63 - 1):
        maker.add(0, 1, (100 + task % 97,), task=task)

    assert succeeded(world, maker.plan())


def test_the_last_byte_of_an_arena_can_be_written(world: World) -> None:
    size = 1001
    maker = Maker()
    made = [maker.add(0, 1, (size,)), maker.add(1, 1, (size,))]
    plan = Plan(
        (replace(made[0], target=Place(1, ROOM - size, (1,))), replace(made[1], source=Place(1, ROOM - size, (1,)))),
        ROOM,
    )

    assert succeeded(world, plan)


def test_a_plan_runs_again_and_again_without_proof_too(world: World) -> None:
    maker = Maker()
    for source, target in itertools.product(range(3), repeat=2):
        maker.add(source, target, (150_001,), write=Layout(skew=int(world.contestant.takes_any_address)))
    for verify in (True, False, False, True):
        assert succeeded(world, maker.plan(), Orders(verify=verify))


def test_progress_rises_and_ends_at_the_bytes_received(world: World) -> None:
    maker = Maker()
    for size in (LARGEST, 70_001, 33, 1):
        for target in (1, 2):
            maker.add(0, target, (size,))
        maker.add(2, 2, (size // 3,))
    plan = maker.plan()
    outcome = world.run(plan)

    everything = sum(t.nbytes for t in plan.transfers)
    for process, answer in outcome.answers.items():
        is_one_sided = world.contestant.capabilities.is_one_sided
        assert answer.received == (everything if is_one_sided else plan.arriving(process))
        assert answer.local == (0 if is_one_sided else plan.staying(process))
        assert list(answer.progress) == sorted(answer.progress)
        assert not answer.received or answer.progress, "nobody was told"
        assert not answer.progress or answer.progress[-1] == answer.received


PROCESSES = st.integers(0, 2)
# few long dimensions: most plans are quick, and some exceed one message
LENGTHS = st.one_of(st.integers(1, 9), st.sampled_from((16, 17, 61, 255, 1000)))


@st.composite
def layouts(draw: Any, dims: int, skews: st.SearchStrategy[int]) -> Layout:
    order = tuple(draw(st.permutations(range(dims))))
    return Layout(order, draw(st.integers(0, 3)), draw(st.sampled_from((1, 1, 1, 2))), draw(skews))


@st.composite
def plans(draw: Any, contestant: Contestant) -> Plan:
    maker = Maker()
    any_address, converts = contestant.takes_any_address, contestant.converts
    on_cpus = BLOCK_CASTS if contestant.device == "cpu" else ()
    tasks = draw(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 5)), max_size=12, unique=True))
    for task, part in tasks:
        shape = draw(st.lists(LENGTHS, max_size=3).map(tuple))
        plain = st.sampled_from(sorted(SIZES)).map(lambda dtype: ("", dtype))
        cast_from, dtype = draw(st.one_of(plain, st.sampled_from(CASTS + on_cpus)) if converts else plain)
        skews = st.integers(0, 15) if any_address else st.just(0)
        before = maker.plan()
        maker.add(
            draw(PROCESSES),
            draw(PROCESSES),
            shape,
            dtype,
            read=draw(layouts(len(shape), skews)),
            write=draw(layouts(len(shape), skews)),
            cast_from=cast_from,
            task=task,
            part=part,
        )
        if maker.plan().room > ROOM:
            return before
    return maker.plan()


def test_any_plan_does_what_the_oracle_says(contestant: Contestant, joined: Callable[[Contestant], World]) -> None:
    @given(
        plans(contestant),
        st.sampled_from((True, True, False)),
    )
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def check(plan: Plan, verify: bool) -> None:
        outcome = joined(contestant).run(plan, Orders(verify=verify))
        assert outcome.errors() == {""}, outcome.answers
        assert outcome.arrived

    check()
