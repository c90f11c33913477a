"""Every command of the pages is run: here, with the words that the pages leave open filled in, or where a list says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from refitd.testing import Daemon, Engine
from refitd_cli.control import main
from tests.support.pages import ROOT

pytestmark = [pytest.mark.own_daemon, pytest.mark.slow, pytest.mark.timeout(240)]

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.stem != "cli")]
# The start of a command that is not run here -> what runs it.
ELSEWHERE = {
    "scripts/": "itself",
    "pip install": "scripts/try-install",
    "refitd serve": "tests/cluster/test_tutorial.py",
    "python engine.py": "tests/cluster/test_tutorial.py",
    "python trainer.py": "tests/cluster/test_tutorial.py",
    "python examples/trl_trainer.py": "scripts/try-engines",
    "python -m verl": "scripts/try-verl",
    "REFITD_NEMO_RL=": "tests/cluster/test_nemo_rl_real.py",
    "REFITD_SGLANG=": "tests/cluster/test_sglang_real.py",
    "VLLM_SERVER_DEV_MODE=": "scripts/try-engines",
    "vllm serve": "scripts/try-engines",
    "--weight-transfer-config": "scripts/try-engines",
    "TRAINER=": "scripts/try-slurm",
    "systemctl": "scripts/try-systemd",
    "docker build": "no test: no docker in the test environment",
    "refitctl dashboard": "tests/cluster/test_dashboard.py",
    "refitctl trace policy --otlp": "tests/unit/test_otlp.py",
}
# Words of the pages, and their values here; {...} are values of the test.
WORDS = (
    ("[policy] [--node n1]", "policy --node {node}"),
    ("drain n1", "drain {node}"),
    ("resume n1", "resume {node}"),
    ("watch policy", "watch policy --count 1"),
    ("version=7", "version={live}"),
    ("--version 7", "--version {live}"),
    ("53bbfaef", "{swap}"),
    ("--from DIR", "--from checkpoint"),
    ("--from Qwen3-8B", "--from checkpoint"),
    ("--from step-40 --prefix model.", "--from step-40"),
    ("-o DIR", "-o saved"),
    ("--log FILE", "--log {log}"),
    ("--config FILE", "--config laptop.toml"),
    ("/etc/refitd", "keys"),
    ("--source ... --target ...", "--source llama-3-70b-train-tp8-pp4.toml --target llama-3-70b-serve-tp4.toml"),
)
FAILS = {"refitctl abort policy": "no swap"}  # no swap runs here


def commands() -> list[tuple[str, str]]:
    """Return (page, command) of all shell blocks, without comments; lines that end in a backslash are joined."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                if command := line.partition(" #")[0].strip().removesuffix("&").strip():
                    found.append((page, command))
    return [(page, command) for page, command in found if not command.startswith(("#", "cd "))]


def is_elsewhere(command: str) -> bool:
    return any(command.startswith(start) for start in ELSEWHERE)


def test_every_command_is_run_here_or_elsewhere() -> None:
    unknown = [each for each in commands() if not each[1].startswith("refitctl ") and not is_elsewhere(each[1])]
    assert unknown == []
    for start, where in ELSEWHERE.items():
        assert " " in where or where == "itself" or (ROOT / where).exists(), start


def test_the_commands_of_the_pages_work(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.checkpoint as dcp

    monkeypatch.setenv("REFITD_RUNTIME_DIR", str(daemon.directory))
    monkeypatch.chdir(tmp_path)
    for path in (ROOT / "configs/layouts").rglob("*.toml"):
        (tmp_path / path.relative_to(ROOT / "configs/layouts")).parent.mkdir(exist_ok=True)
        (tmp_path / path.relative_to(ROOT / "configs/layouts")).write_bytes(path.read_bytes())
    (tmp_path / "log").write_text("a line\n")
    (tmp_path / "checkpoint").mkdir()
    save_file({"w": torch.ones(8)}, tmp_path / "checkpoint/model.safetensors")
    dcp.save({"w": torch.ones(8)}, checkpoint_id="step-40")
    trained = [(page, command) for page, command in commands() if command.startswith("refitctl ")]
    trained = [each for each in trained if not is_elsewhere(each[1])]
    with daemon.connect() as client, daemon.connect() as other:
        target = client.register_target("policy", {"w": torch.zeros(8)}, replica="a")
        source = client.register_source("policy", {"w": torch.ones(8)})
        with Engine(target):
            source.publish(1)
            client.swap("policy", 1, timeout=60)
            for page, command in trained:
                is_from_disk = command.startswith(("refitctl publish", "refitctl save"))
                if is_from_disk and source is not None:
                    source.close()  # a checkpoint takes the trainer's place
                    source = None
                elif not is_from_disk and source is None:
                    client.forget("policy")
                    source = client.register_source("policy", {"w": torch.ones(8)})
                if source is not None and command.startswith(("refitctl swap", "refitctl rollback")):
                    source.publish(source.next_version)
                    if "rollback" in command:
                        client.swap("policy", timeout=60)
                if "evict" in command:
                    other.register_target("policy", {"w": torch.zeros(8)}, replica="engine-1")
                history = client.history("policy").swaps
                values = {
                    "node": daemon.node().node,
                    "live": target.version,
                    "swap": history[0].swap if history else "",
                    "log": tmp_path / "log",
                }
                words = command
                for old, new in WORDS:
                    words = words.replace(old, new.format(**values))
                words, _, into = words.partition(" >")
                ran = CliRunner().invoke(main, shlex.split(words)[1:])
                if into:
                    (tmp_path / into.strip()).write_text(ran.stdout)
                failure = FAILS.get(command, "")
                assert (ran.exit_code != 0) == bool(failure), f"{page}: {command}: {ran.output}"
                assert failure in ran.output
                if "publish policy" in command and "--swap" not in command:
                    client.swap("policy", timeout=60)
                if "drain" in command:
                    client.resume(values["node"])
