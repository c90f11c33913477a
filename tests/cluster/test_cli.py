"""refitctl against a live daemon; `programs.refitctl` compares what commands print with --json with their schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from refitd.testing import Cluster, Daemon, Engine, eventually
from tests.support import shards
from tests.support.json_schema import check_printed
from tests.support.names import named, policy
from tests.support.programs import ended, refitctl


def test_swap_status_plan_and_models_show_a_live_fleet(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        full = shards.whole(1)
        source = trainer.register_source(policy(), full)
        live = shards.zeros_like(full)
        target = engine.register_target(policy(), live, replica="engine-a")
        source.publish(3)
        with Engine(target):
            done = refitctl(daemon, "swap", policy(), "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["outcome"], report["version"]) == ("committed", 3)
        assert shards.equal(live, full)
        for command in (("status",), ("models",), ("plan", policy())):
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
        # registrations written to files can be planned without the daemon
        for name, side in (("a", ()), ("b", ("--replica", "engine-a"))):
            written = refitctl(daemon, "manifest", policy(), *side, "--output", str(tmp_path / f"{name}.json"))
            assert written.returncode == 0, written.stderr
        sides = ("--source", str(tmp_path / "a.json"), "--target", str(tmp_path / "b.json"))
        offline = json.loads(refitctl(daemon, "plan", *sides, "--json").stdout)
        assert offline["bytes"] == report["bytes"]


def test_a_swap_that_failed_exits_non_zero_and_names_the_culprit(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), shards.whole(1))
        engine.register_target(policy(), shards.whole(2), replica="deaf")
        source.publish(1)
        done = refitctl(daemon, "swap", policy(), "--version", "1")
        assert done.returncode != 0
        for word in ("deaf", "commit", "did not take over", "pid"):
            assert word in done.stdout + done.stderr
        unknown = refitctl(daemon, "swap", "polcy", "--json")
        assert unknown.returncode != 0
        assert "registered models: policy" in json.loads(unknown.stdout)["error"]["message"]


@pytest.mark.slow  # 30 commands
def test_what_commands_print_of_a_live_cluster_fits_their_schemas(tmp_path: Path) -> None:
    with Cluster(("n0", "n1")) as cluster:
        n0, n1 = cluster.daemons["n0"], cluster.daemons["n1"]

        def said(status: int, command: str, *words: str) -> dict:
            ran = refitctl(n0, command, *words, "--json")
            assert ran.returncode == status, (command, words, ran.stdout, ran.stderr)
            return json.loads(ran.stdout)

        with n0.connect() as trainer, n1.connect() as far:
            for model in (policy(), named("draft")):
                source = trainer.register_source(model, {"w": torch.ones(64, 32)}, slots=3)
                source.publish(1)
                source.publish(2)
            names = [(trainer, policy(), "a"), (far, policy(), "b"), (trainer, named("draft"), "a")]
            targets = [
                client.register_target(model, {"w": torch.zeros(64, 32)}, replica=replica)
                for client, model, replica in names
            ]
            with Engine(*targets):
                said(0, "swap", policy(), "--version", "1")
                said(0, "swap", policy(), "--with", "draft:2")
                eventually(lambda: targets[1].version == 2, "b has it")
                said(0, "rollback", policy())
                said(1, "swap", policy(), "--version", "9")
                for command in ("history", "verify", "plan", "abort"):
                    said(int(command == "abort"), command, policy())
                for command in ("status", "models"):
                    said(0, command)
                said(0, "watch", "--count", "1")
                said(0, "trace", policy(), "-o", str(tmp_path / "trace.json"))
                said(0, "manifest", policy())
                for file, side in (("a", ()), ("b", ("--replica", "a"))):
                    said(0, "manifest", policy(), *side, "--output", str(tmp_path / file))
                assert said(0, "drain", "n1")["changed"] and not said(0, "drain", "n1")["changed"]
                assert said(0, "resume", "n1")["replicas"]
                said(0, "save", policy(), "-o", str(tmp_path / "saved"))
                said(0, "reload")
                assert said(0, "evict", policy(), "--replica", "b", "--reason", "tried")["members"]
                said(1, "evict", policy(), "--replica", "b")
                refused = said(1, "swap", named("draft"), "--version", "7", "--timeout", "2")
                assert refused["error"]
            # no target polls now: the swap is decided, and its deadline passes
            source.publish(3)
            assert said(1, "swap", named("draft"), "--timeout", "1")["error"]
        eventually(lambda: not trainer_is_there(cluster), "the trainer is gone")
        said(0, "forget", named("draft"))
        (tmp_path / "given").mkdir()
        save_file({"w": torch.ones(8)}, tmp_path / "given/model.safetensors", metadata={"format": "pt"})
        said(0, "publish", "other", "--from", str(tmp_path / "given"))
        with n0.connect() as engine, Engine(engine.register_target("other", {"w": torch.zeros(8)}, replica="a")):
            said(0, "publish", "other", "--from", str(tmp_path / "given"), "--swap")
        said(0, "support-bundle", "-o", str(tmp_path / "bundle.tar.gz"))
        line = [sys.executable, "-m", "refitd_cli.control", "dashboard", "--port", "0", "--json"]
        with ended(
            subprocess.Popen([*line, "--address", str(n0.directory)], stdout=subprocess.PIPE, text=True)
        ) as page:
            assert page.stdout is not None
            check_printed(("dashboard",), page.stdout.readline())


def trainer_is_there(cluster: Cluster) -> bool:
    with cluster.daemons["n0"].connect() as client:
        return any(source.attached for model in client.status().models for source in model.sources)
