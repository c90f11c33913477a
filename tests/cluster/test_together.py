"""Versions of several models go live by one decision, all or none; and the awaitable forms of the blocking calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import refitd
from refitd.testing import Daemon, Engine
from refitd_cli.control import main
from tests.support.controls import controlled
from tests.support.names import named, policy
from tests.support.passed_on import Start


class Pair:
    """A trainer and an engine of a policy and its draft."""

    def __init__(self, daemon: Daemon, **hooks: Any) -> None:
        self.trainer, self.engine = daemon.connect(), daemon.connect()
        self.given = {name: {"w": torch.zeros(32, 8)} for name in (policy(), named("draft"))}
        self.live = {name: {"w": torch.zeros(32, 8)} for name in self.given}
        self.sources = {name: self.trainer.register_source(name, given) for name, given in self.given.items()}
        self.targets = {
            name: controlled(self.engine, name, live, replica="a", **hooks)
            if hooks and name == named("draft")
            else self.engine.register_target(name, live, replica="a")
            for name, live in self.live.items()
        }

    def publish(self, version: int) -> None:
        for name, source in self.sources.items():
            self.given[name]["w"].fill_(version)
            source.publish(version)

    def values(self) -> dict[str, float]:
        return {name: float(live["w"].unique()) for name, live in self.live.items()}


def test_two_models_are_decided_together(daemons: Start) -> None:
    daemon = daemons()[0]
    pair = Pair(daemon)
    pair.publish(1)
    with Engine(*pair.targets.values()):
        reports = pair.trainer.swap_together({policy(): 1, named("draft"): None}, timeout=30)
        assert {name: (r.outcome, r.version) for name, r in reports.items()} == {
            policy(): ("committed", 1),
            named("draft"): ("committed", 1),
        }
        assert pair.values() == {policy(): 1.0, named("draft"): 1.0}
        pair.publish(2)
        args = ["swap", policy(), "--with", f"{named('draft')}:2", "--json", "--address", str(daemon.directory)]
        result = CliRunner().invoke(main, args)
        assert result.exit_code == 0, result.output
        assert [m["version"] for m in json.loads(result.stdout)["models"]] == [2, 2]
    with pytest.raises(refitd.RefusedError, match="no model 'other'"):
        pair.trainer.swap_together({policy(): 2, "other": None})
    with pytest.raises(refitd.RefusedError, match="name 1 to"):
        pair.trainer.swap_together({})


def test_one_that_aborts_takes_the_others_with_it(daemons: Start) -> None:
    def refuse(version: int) -> None:
        raise RuntimeError("not now")

    pair = Pair(daemons()[0], pause=refuse)
    pair.publish(1)
    with Engine(pair.targets[policy()]), pytest.raises(refitd.SwapFailed) as raised:
        pair.trainer.swap_together({policy(): 1, named("draft"): 1}, timeout=30)
    assert [report.outcome for report in raised.value.together] == ["aborted", "aborted"]
    assert f"together with model '{named('draft')}'" in str(raised.value) and "not now" in str(raised.value)
    assert pair.values() == {policy(): 0.0, named("draft"): 0.0} and pair.targets[policy()].version is None
    (entry,) = pair.trainer.history(policy()).swaps
    assert entry.state == "aborted"
    with Engine(pair.targets[policy()]):  # without the other model it may go live
        assert pair.trainer.swap(policy(), 1, timeout=30).outcome == "committed"


def test_a_model_whose_engine_sleeps_takes_part_in_no_joint_swap(daemons: Start) -> None:
    pair = Pair(daemons()[0])
    for version in (1, 2):
        pair.publish(version)
        both = {policy(): version, named("draft"): version}
        with Engine(*pair.targets.values()):
            if version == 2:
                pair.targets[named("draft")].suspend()
                with pytest.raises(refitd.RefusedError, match="suspended"):
                    pair.trainer.swap_together(both, timeout=30)
                assert (
                    pair.values() == {policy(): 1.0, named("draft"): 1.0} and pair.targets[named("draft")].resume() == 1
                )
            pair.trainer.swap_together(both, timeout=30)
        assert pair.values() == {policy(): float(version), named("draft"): float(version)}


def test_an_event_loop_runs_on_while_versions_are_published_swapped_and_awaited(
    daemons: Start,
) -> None:
    pair = Pair(daemons()[0])

    async def work() -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.002)

        ticking = asyncio.create_task(tick())
        for source in pair.sources.values():
            await source.publish_async(1)
        waiting = [asyncio.create_task(target.wait_async(1, timeout=30)) for target in pair.targets.values()]
        await pair.trainer.swap_together_async({policy(): 1, named("draft"): 1}, timeout=30)
        assert await asyncio.gather(*waiting) == [1, 1]
        with pytest.raises(refitd.DeadlineExceeded):
            await pair.targets[policy()].wait_async(2, timeout=0.1)
        ticking.cancel()
        return ticks

    assert asyncio.run(work()) > 20
