"""Each adapter of a framework shows the same behaviour; tests/support/adapters.py has the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from refitd.testing import Daemon, eventually
from tests.support.adapter_ranks import values
from tests.support.adapters import ADAPTERS, TRAINER, Failed, Job

pytestmark = pytest.mark.own_daemon

Start = Callable[..., Job]
each = pytest.mark.parametrize("adapter", ADAPTERS)


@pytest.fixture
def start(daemon: Daemon, adapter: str) -> Iterator[Start]:
    """Return a function that starts a job with engines of these names."""
    started: list[Job] = []

    def begin(*engines: str) -> Job:
        started.append(ADAPTERS[adapter](daemon, *engines))
        return started[-1]

    yield begin
    for job in started:
        job.kill_all()


def updated(job: Job, step: int) -> None:
    """Update, and check every byte of every engine."""
    job.update(step)
    assert job.holding(step) == job.engines


SAYS = {
    "raises": "RuntimeError: the gather failed",
    "missing": "ended without 1 of 6 tensors: ['mlp']",
    "shape": "mlp: it is [64, 128] ",
    "twice": "mlp: the iterator yields it twice",
    "unknown": "other",
    "no pair": "expected (name, tensor)",
}


@pytest.mark.parametrize("adapter", [name for name, job in ADAPTERS.items() if job.streams])
def test_a_stream_that_is_wrong_ends_the_update_and_the_next_one_works(start: Start) -> None:
    job = start("a")
    for fault in ("raises", "twice", "no pair"):  # in the first update, which does not know the shapes yet
        refused(job, 9, fault)
    updated(job, 1)
    for step, fault in enumerate(SAYS, 2):
        refused(job, 9, fault)
        assert job.holding(step - 1) == job.engines, "the version before is live"
        updated(job, step)


def refused(job: Job, step: int, fault: str) -> None:
    with pytest.raises(Failed) as caught:
        job.update(step, fault=fault)
    assert TRAINER in caught.value.by and SAYS[fault] in str(caught.value)


@each
def test_engines_hold_every_version_fail_join_leave_and_return_and_a_close_leaves_nothing(start: Start) -> None:
    job = start("a", "b")
    before = -1
    for step in (1, 2, 3):
        updated(job, step)
        assert job.live() > before
        before = job.live()

    with pytest.raises(Failed) as caught:
        job.update(4, fails="b")
    reasons = "the loader failed", "out of memory", "'b' rank 0", "'a-dp1' rank 0"
    assert any(reason in str(caught.value) for reason in reasons), caught.value
    assert "a" not in caught.value.by and job.holding(4)[:1] == ["a"], "the version is live elsewhere"
    updated(job, 5)

    job.leave("b")
    updated(job, 6)
    assert job.registered() == 1
    job.join("b")
    updated(job, 7)

    job.close()
    eventually(lambda: not job.daemon.status().models, "no rank is registered")
    eventually(lambda: job.daemon.node().clients == 1, "only this test is connected")
    assert job.daemon.node().arenas == 0 or not job.closes, "the arenas of processes that were killed stay for a while"


@each
def test_deaths_of_an_engine_the_trainer_and_the_daemon_end_at_most_one_update_each(start: Start) -> None:
    job = start("a", "b")
    updated(job, 1)
    try:
        job.update(2, dies="b")
    except Failed as failed:
        assert "a" in failed.by or TRAINER in failed.by
    else:
        assert job.ask("a", "holds", 2)
    job.replace("b")  # or its driver has dropped it
    updated(job, 3)

    before = job.live()
    try:
        job.update(4, dies=TRAINER)
    except Failed as failed:
        assert failed.by.keys() == {*job.engines}, "engines that wait for it are told"
    job.replace(*job.ranks)
    updated(job, 5)
    assert job.live() > before

    job.daemon.kill()
    job.daemon.start()
    try:
        job.update(6)
    except Failed:
        job.repair()
    updated(job, 7)


@pytest.mark.parametrize(("adapter", "replica"), [("vllm-follows", "a"), ("sglang-follows", "a-dp0")])
def test_a_following_engine_waits_for_its_name(daemon: Daemon, start: Start, replica: str) -> None:
    with daemon.connect("predecessor") as predecessor:
        predecessor.register_target("policy", values(0), replica=replica)
        job = start("a")
        job.ask("a", "wait_until_refused")
    updated(job, 1)
