"""Impossible transfers are refused on every process before anything is posted or written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from refitd.testing.conformance.transfers import Layout, Maker, Orders, Place, Plan, Transfer
from refitd.testing.conformance.world import ROOM, STAGING_BYTES, Contestant, Outcome, World


def small_plan() -> Plan:
    """Transfers between all neighbours, and within each process."""
    maker = Maker()
    for source in range(3):
        maker.add(source, (source + 1) % 3, (50_001,))
        maker.add(source, source, (33, 4), "float32")
    return maker.plan()


def changed(plan: Plan, number: int, **fields: Any) -> Plan:
    transfers = list(plan.transfers)
    transfers[number] = replace(transfers[number], **fields)
    return replace(plan, transfers=tuple(transfers))


def refused_by_all(world: World, outcome: Outcome) -> str:
    """Check that no byte was written and that the service still works; return the error text of all processes."""
    assert outcome.errors() == {"RefusedError"}, outcome.answers
    assert outcome.untouched
    said = {answer.said for answer in outcome.answers.values()}
    assert len(said) == 1, said
    assert all(answer.is_usable and not answer.progress for answer in outcome.answers.values())
    assert world.run(small_plan()).arrived
    return said.pop()


def test_ends_that_differ_in_size_are_refused(exchange: World) -> None:
    plan = small_plan()
    said = refused_by_all(exchange, exchange.run(plan, plan_of={1: changed(plan, 0, shape=(50_000,))}))

    assert "alpha is about to send 1 pieces, 50001 bytes, but beta expects 1 pieces, 50000 bytes" in said


def test_ends_that_differ_in_ids_are_refused(exchange: World) -> None:
    plan = small_plan()
    for other in (changed(plan, 0, task=7), changed(plan, 0, part=1)):
        assert "others of that size" in refused_by_all(exchange, exchange.run(plan, plan_of={0: other}))


def test_ends_that_differ_in_elements_of_one_size_are_refused(exchange: World) -> None:
    """As many bytes, with one id: 300 elements of two bytes, or 150 of four."""
    maker = Maker()
    maker.add(0, 1, (300,), "bfloat16")
    plan = maker.plan()

    refused_by_all(exchange, exchange.run(plan, plan_of={1: changed(plan, 0, shape=(150,), dtype="float32")}))


def test_a_transfer_that_one_end_knows_nothing_of_is_refused(exchange: World) -> None:
    plan = small_plan()
    for process in (0, 1):
        forgotten = replace(plan, transfers=plan.transfers[1:])
        refused_by_all(exchange, exchange.run(plan, plan_of={process: forgotten}))


def test_a_process_with_halves_of_a_transfer_to_itself_that_differ_is_refused(exchange: World) -> None:
    plan = small_plan()
    said = refused_by_all(exchange, exchange.run(plan, Orders(), orders_of={0: Orders(forgets_local_receive=True)}))

    assert "of rank 0 with itself has no receive" in said


def test_ends_that_differ_in_verification_are_refused(exchange: World) -> None:
    outcome = exchange.run(small_plan(), orders_of={2: Orders(verify=False)})

    assert "verification" in refused_by_all(exchange, outcome)


def test_ends_that_differ_in_staging_are_refused(two_sided: Contestant, fresh: Callable[..., World]) -> None:
    world = fresh(two_sided)
    world.join(staging={1: 64 * STAGING_BYTES})
    outcome = world.run(small_plan())
    assert outcome.errors() == {"RefusedError"} and outcome.untouched
    assert all("equal message sizes" in a.said and a.is_usable for a in outcome.answers.values())

    assert {answer.error for answer in world.join().values()} == {""}
    assert world.run(small_plan()).arrived


def test_what_stands_in_the_way_on_one_process_is_told_to_all(exchange: World) -> None:
    outcome = exchange.run(small_plan(), orders_of={1: Orders(refuse="beta: its model has changed")})

    assert "beta: its model has changed" in refused_by_all(exchange, outcome)


def test_a_process_that_cannot_finish_fails_all(exchange: World) -> None:
    outcome = exchange.run(small_plan(), orders_of={2: Orders(fails_to_finish=True)})

    assert outcome.errors() == {"RefitFailed"}
    assert all("gamma: ValueError: no room" in a.said and a.is_usable for a in outcome.answers.values())
    assert exchange.run(small_plan()).arrived


def _beyond_target(transfer: Transfer) -> Transfer:
    return replace(transfer, target=replace(transfer.target, offset=ROOM - transfer.nbytes + 1))


def _beyond_source(transfer: Transfer) -> Transfer:
    return replace(transfer, source=replace(transfer.source, offset=ROOM - transfer.nbytes + 1))


def _before(transfer: Transfer) -> Transfer:
    return replace(transfer, target=replace(transfer.target, offset=-1))


def _backwards(transfer: Transfer) -> Transfer:
    return replace(transfer, target=replace(transfer.target, offset=100_000, strides=(-1,)))


def _unknown_arena(transfer: Transfer) -> Transfer:
    return replace(transfer, source=Place(99, 0, (1,)), target=replace(transfer.target, process=98))


@pytest.mark.parametrize("bad", [_beyond_target, _beyond_source, _before, _backwards, _unknown_arena])
def test_a_copy_that_would_leave_its_arena_is_refused(mapped: World, bad: Callable[[Transfer], Transfer]) -> None:
    plan = small_plan()
    transfers = (*plan.transfers, bad(plan.transfers[0]))
    answer = mapped.prepare(replace(plan, transfers=transfers))

    assert "TransportError" in answer.kinds and f"copy {len(plan.transfers)}" in answer.said
    assert mapped.untouched
    assert mapped.run(plan).arrived


def test_a_copy_into_an_arena_that_is_mapped_for_reading_is_refused(mapped: World) -> None:
    plan = small_plan()
    answer = mapped.prepare(plan, written=0)

    assert "TransportError" in answer.kinds and "for reading only" in answer.said
    assert mapped.run(plan).arrived


def test_elements_that_lie_on_each_other_are_noticed_by_all(world: World) -> None:
    """A box with overlapping rows cannot store all sent bytes, so its content differs from the bytes that were read."""
    maker = Maker()
    transfer = maker.add(0, 1, (40, 64), "int64", write=Layout(gap=0))
    maker.add(1, 2, (5_000,))
    plan = changed(maker.plan(), 0, target=replace(transfer.target, strides=(8 * 32, 8)))
    outcome = world.run(plan)

    assert outcome.errors() == {"DigestMismatch"}
    for answer in outcome.answers.values():
        assert "TransportError" in answer.kinds and answer.is_usable
        if world.contestant.capabilities.is_one_sided:
            assert answer.copy == 0
        else:
            assert "the bytes that beta wrote differ from the bytes that alpha read" in answer.said
    assert world.run(small_plan()).arrived
    assert world.run(plan, Orders(verify=False)).errors() == {""}, "without verification nobody looks"


@pytest.mark.parametrize("target", [1, 0], ids=["remote", "local"])
def test_bytes_that_do_not_land_are_noticed_by_all(exchange: World, target: int) -> None:
    maker = Maker()
    maker.add(0, target, (300_007,))
    maker.add(1, 2, (5,))
    outcome = exchange.run(maker.plan(), orders_of={target: Orders(loses=True)})

    assert outcome.errors() == {"DigestMismatch"}
    assert all(answer.is_usable for answer in outcome.answers.values())
    assert exchange.run(small_plan()).arrived


@pytest.mark.parametrize("stride", [1, 2], ids=["contiguous", "strided"])
def test_a_destination_that_changes_while_it_is_written_is_noticed_by_all(world: World, stride: int) -> None:
    if not world.contestant.is_shared:
        pytest.skip("no other process reaches the destination")
    maker = Maker()
    maker.add(0, 1, (200_000,), write=Layout(spread=stride))
    plan = maker.plan()
    with world.scribbling(1, 0, 16):
        for _ in range(500):
            outcome = world.run(plan)
            if outcome.errors() != {""}:
                break

    assert outcome.errors() == {"DigestMismatch"}
    assert all(answer.is_usable for answer in outcome.answers.values())
    assert world.run(plan).arrived
