"""refitctl against a live daemon."""

from __future__ import annotations

import json
from pathlib import Path

from refitd.testing import Daemon, Engine
from tests.support import shards
from tests.support.programs import refitctl


def test_swap_status_plan_and_models_show_a_live_fleet(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        full = shards.whole(1)
        source = trainer.register_source("policy", full)
        live = shards.zeros_like(full)
        target = engine.register_target("policy", live, replica="engine-a")
        source.publish(3)
        with Engine(target):
            done = refitctl(daemon, "swap", "policy", "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["outcome"], report["version"]) == ("committed", 3)
        assert shards.equal(live, full)
        for command in (("status",), ("models",), ("plan", "policy")):
            shown = refitctl(daemon, *command)
            assert shown.returncode == 0, shown.stderr
            assert json.loads(refitctl(daemon, *command, "--json").stdout)
        assert "engine-a" in refitctl(daemon, "status").stdout
        watched = refitctl(daemon, "watch", "--count", "2", "--interval", "0.2", "--json")
        assert (watched.returncode, watched.stderr) == (0, "")
        first, second = map(json.loads, watched.stdout.splitlines())
        assert [model["last_swap"]["version"] for model in first["models"]] == [3]
        assert second["coordinator_pid"] == first["coordinator_pid"]
        assert second["uptime_s"] > first["uptime_s"]
        # what is registered can be planned again from files, without the daemon
        for name, side in (("a", ()), ("b", ("--replica", "engine-a"))):
            written = refitctl(daemon, "manifest", "policy", *side, "--output", str(tmp_path / f"{name}.json"))
            assert written.returncode == 0, written.stderr
        sides = ("--source", str(tmp_path / "a.json"), "--target", str(tmp_path / "b.json"))
        offline = json.loads(refitctl(daemon, "plan", *sides, "--json").stdout)
        assert offline["bytes"] == report["bytes"]


def test_a_swap_that_failed_exits_non_zero_and_names_the_culprit(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("policy", shards.whole(1))
        engine.register_target("policy", shards.whole(2), replica="deaf")
        source.publish(1)
        done = refitctl(daemon, "swap", "policy", "--version", "1")
        assert done.returncode != 0
        for word in ("deaf", "commit", "did not take over", "pid"):
            assert word in done.stdout + done.stderr
        unknown = refitctl(daemon, "swap", "polcy", "--json")
        assert unknown.returncode != 0
        assert "registered models: policy" in json.loads(unknown.stdout)["error"]["message"]
