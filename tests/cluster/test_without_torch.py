"""A coordinator and refitctl do all of their work where torch is not installed, and name the extra that installs it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from refitd.testing import Engine
from refitd.testing.daemon import Cluster
from tests.support.manifests import LAYOUTS
from tests.support.programs import ROOT, run

PATH = os.pathsep.join(filter(None, (str(ROOT / "tests/support/no_torch"), os.environ.get("PYTHONPATH"))))
SIDES = f"--source {LAYOUTS}/llama-3-70b-train-tp8-pp4.toml --target {LAYOUTS}/llama-3-70b-serve-tp4.toml"
CLUSTER = ROOT / "configs/clusters/dgx-h100.toml"

# each line of stdin is a command line; its status and output follow
RUNNER = """
import contextlib, io, json, shlex, sys
from refitd_cli.control import main
for line in sys.stdin:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = main(shlex.split(line), prog_name="refitctl", standalone_mode=False)
        except SystemExit as exc:
            status = exc.code
    print(json.dumps([status or 0, out.getvalue()]))
assert sys.modules["torch"] is None
"""


def said(commands: Sequence[str]) -> list[tuple[int, str]]:
    """Return the status and the output of each refitctl command, all in one process without torch."""
    ran = run([sys.executable, "-c", RUNNER], input="\n".join(commands), env={**os.environ, "PYTHONPATH": PATH})
    assert ran.returncode == 0, ran.stderr
    return [(status, text) for status, text in map(json.loads, ran.stdout.splitlines())]


def test_commands_without_a_daemon_need_no_torch_or_name_the_extra(tmp_path: Path) -> None:
    works = [
        "--help",
        f"plan {SIDES} --top 1",
        f"explain model.layers.0.self_attn.qkv_proj.weight {SIDES} --json",
        f"simulate {SIDES} --cluster {CLUSTER}",
        f"config check --coordinator --config {ROOT / 'configs/coordinator.toml'}",
        f"keygen n0 --directory {tmp_path}",
    ]
    *done, doctor, demo = said([*works, "doctor --json --address /nowhere", "demo"])
    for command, (status, text) in zip(works, done, strict=True):
        assert status == 0, f"{command}: {text}"
    assert "torch is not installed; `pip install 'refitd[torch]'` brings it" in doctor[1]
    assert demo == (1, "refitctl: torch is not installed; `pip install 'refitd[torch]'` brings it\n")


def test_what_needs_torch_says_so_and_how_to_install_it() -> None:
    asked = "\n".join(["import refitd", "try: refitd.Source", "except ModuleNotFoundError as exc: print(exc)"])
    asked += "\ntry: refitd.Client.register_source(None, 'm', {})\nexcept ImportError as exc: print(exc.name, exc)"
    ran = run([sys.executable, "-c", asked], env={**os.environ, "PYTHONPATH": PATH})
    lacks = "needs torch, which is not installed here; `pip install 'refitd[torch]'` brings it"
    assert ran.stdout.splitlines() == [f"refitd.Source {lacks}", f"torch Client.register_source {lacks}"], ran.stderr


class Bare(Cluster):
    """A cluster whose coordinator has no torch."""

    def environment(self, name: str) -> Mapping[str, str]:
        return {"PYTHONPATH": PATH} if name == "coordinator" else {}


@pytest.mark.slow
def test_a_coordinator_without_torch_plans_and_decides_and_refitctl_shows_it_all() -> None:
    with Bare() as cluster:
        first, second = cluster.daemons.values()
        with first.connect("trainer") as trainer, second.connect("engine") as engine:
            source = trainer.register_source("m", {"w": torch.ones(64)})
            target = engine.register_target("m", {"w": torch.zeros(64)}, replica="a")
            with Engine(target):
                source.publish(1)
                address = f"--address {first.directory}"
                asked = ["swap m", "status", "plan m", "history m", "models", "verify m", "manifest m"]
                asked += [f"trace m -o {cluster.folder / 'trace.json'}", "drain n1 --json", "resume n1"]
                for command, (status, text) in zip(asked, said([f"{c} {address}" for c in asked]), strict=True):
                    assert status == 0, f"{command}: {text}"
                lacking = said([f"save m -o {cluster.folder / 'saved'} {address}", f"save m -o x --json {address}"])
                assert lacking[0] == (
                    1,
                    "refitctl: torch is not installed; `pip install 'refitd[torch]'` brings it\n",
                )
                assert lacking[1][0] == 1 and json.loads(lacking[1][1])["error"]["code"] == "missing"
            assert target.version == 1
            for part in cluster.parts():
                maps = Path(f"/proc/{part.pid}/maps").read_text()
                assert "libtorch" not in maps, f"process {part.pid} has loaded torch"
