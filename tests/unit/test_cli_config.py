"""refitctl config and support-bundle show the effective settings and their origins, and never a key."""

from __future__ import annotations

import json
import os
import tarfile
import tomllib
from pathlib import Path

import pytest
from msgspec import structs

from refitd import config
from refitd.errors import TransportError
from refitd.protocol import keys
from tests.support.cli import FakeClient, run

FILE = """
[node]
name = "n7"
workers = 3
roles = { 0 = ["engine"] }
[models."llama 3"]
auto_swap = true
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "refitd.toml"
    found.write_text(FILE)
    return found


def test_show_prints_toml_that_means_the_same(path, tmp_path):
    shown = run(FakeClient(), "config", "show", "--config", str(path)).stdout
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert config.load(again, environ={}).models == config.load(path, environ={}).models
    assert tomllib.loads(shown)["node"]["name"] == "n7"


def test_show_names_the_file_variable_or_flag_of_each_value(path, monkeypatch):
    monkeypatch.setenv("REFITD_NODE__WORKERS", "5")
    monkeypatch.setenv("REFITD_TRANSPORT__LANES", "1")
    ran = run(FakeClient(), "config", "show", "--config", str(path), "--log-level", "debug")
    lines = ran.stdout.splitlines()
    for expected in (
        f'name = "n7"  # {path}',
        "workers = 5  # REFITD_NODE__WORKERS",
        "lanes = 1  # REFITD_TRANSPORT__LANES",
        'level = "debug"  # --log-level',
        'service = "gloo"  # default',
        f'roles = {{ "0" = ["engine"] }}  # {path}',
        f"auto_swap = true  # {path}",
        "verify = true  # default",
    ):
        assert expected in lines, expected
    found = run(FakeClient(), "config", "show", "--config", str(path), "--json").object
    assert (found["configuration"]["node"]["workers"], found["from"]["node.workers"]) == (5, "REFITD_NODE__WORKERS")


def test_a_variable_that_sets_a_whole_table_is_named_for_all_of_it(path, monkeypatch):
    monkeypatch.setenv("REFITD_MODELS", "{ llama = { verify = false } }")
    lines = run(FakeClient(), "config", "show", "--config", str(path)).stdout.partition('[models."llama"]')[2]
    assert "verify = false  # REFITD_MODELS" in lines
    assert "auto_swap = false  # default" in lines


def test_empty_values_are_shown_as_what_they_stand_for(monkeypatch):
    monkeypatch.setenv("REFITD_RUNTIME_DIR", "/run/here")
    shown = run(FakeClient(), "config", "show").stdout
    assert 'runtime_dir = "/run/here"  # default' in shown
    assert 'endpoint = "ipc:///run/here/coordinator.sock"  # default' in shown


@pytest.fixture
def keyed(tmp_path: Path) -> tuple[Path, str]:
    """The configuration of a daemon with keys, and its secret."""
    head, own = keys.generate("head"), keys.generate("n7")
    keys.write(head, tmp_path)
    keys.write(own, tmp_path)
    found = tmp_path / "keyed.toml"
    found.write_text(
        f'[coordinator]\nendpoint = "tcp://127.0.0.1:1"\n[security]\nkey = "{tmp_path}/n7.key"\n'
        f'server_key = "{tmp_path}/head.pub"\n'
    )
    return found, own.secret


def test_check_reads_the_keys_and_exits_2_for_what_no_process_would_start_with(keyed, tmp_path):
    path, _ = keyed
    ran = run(FakeClient(), "config", "check", "--config", str(path))
    assert (ran.status, "key of n7" in ran.stdout) == (0, True)
    (tmp_path / "n7.key").chmod(0o644)
    found = run(FakeClient(), "config", "check", "--config", str(path), "--json")
    assert (found.status, found.object["valid"]) == (2, False)
    (failed,) = [one for one in found.object["checks"] if one["state"] == "fail"]
    assert "chmod 600" in failed["found"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[transport]\nservice = "shm"\n', "shm"),
        ('[transport]\nservice = "pigeon"\n', "pigeon"),
        ('[node]\nroles = { nobody-there = ["engine"] }\n', "nobody-there"),
        ("[node]\nwrokers = 1\n", "wrokers"),
        ('[node]\nruntime_dir = "/tmp"\n', "mode"),
        ('[node]\nruntime_dir = "/dev/null/refitd"\n', "/dev/null"),
        ('[metrics]\nendpoint = "192.0.2.1:9464"\n', "address of this host"),
        ('[metrics]\nendpoint = "a..b:9464"\n', "no host's name"),
        ('[metrics]\nhosts = ["prometheus:9090"]\n', "without scheme and port"),
    ],
)
def test_check_refuses_what_the_processes_refuse(tmp_path, text, named):
    path = tmp_path / "refitd.toml"
    path.write_text(text)
    ran = run(FakeClient(), "config", "check", "--config", str(path))
    assert ran.status == 2
    assert named in ran.stdout + ran.stderr


def test_a_secret_that_was_pasted_for_its_file_is_shown_nowhere(keyed, tmp_path):
    path, secret = keyed
    pasted = tmp_path / "pasted.toml"
    pasted.write_text(path.read_text().replace(f"{tmp_path}/n7.key", secret))
    for words in (("config", "show"), ("config", "show", "--json"), ("config", "check")):
        ran = run(FakeClient(), *words, "--config", str(pasted))
        assert secret not in ran.stdout + ran.stderr, words


# --- support-bundle ---------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        files = {Path(entry.name).name: archive.extractfile(entry) for entry in archive.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def test_a_bundle_holds_what_it_lists_and_no_key(keyed, tmp_path):
    path, secret = keyed
    log = tmp_path / "daemon.log"
    log.write_bytes(b"old\n" * 1_500_000 + b"the last line\n")
    out = tmp_path / "b.tar.gz"
    ran = run(FakeClient(), "support-bundle", "-o", str(out), "--config", str(path), "--log", str(log), "--json")
    assert (ran.status, ran.stderr, out.stat().st_mode & 0o777) == (0, "", 0o600)
    found = contents(out)
    assert [item["name"] for item in ran.object["items"]] == list(found)
    assert json.loads(found["status.json"])["coordinator_pid"] == 3
    assert len(json.loads(found["history.json"])["swaps"]) == 2
    assert "refitd" in json.loads(found["versions.json"])
    assert found["log-1-daemon.log"].endswith(b"the last line\n") and len(found["log-1-daemon.log"]) == 4_000_000
    assert all(name in found["README"].decode() for name in found if name != "README")
    assert not any(secret.encode() in content for content in found.values())


def test_a_bundle_is_made_without_a_daemon_and_says_what_is_missing(tmp_path):
    out = tmp_path / "b.tar.gz"
    ran = run(TransportError("no daemon runs"), "support-bundle", "-o", str(out), "--log", str(tmp_path / "none"))
    assert ran.status == 0
    found = contents(out)
    assert found["status.json.missing"] == b"no daemon runs\n"
    assert "log-1-none.missing" in found
    again = run(TransportError("no daemon runs"), "support-bundle", "-o", str(out))
    assert (again.status, "choose another" in again.stderr) == (2, True)


def test_a_log_that_never_ends_or_is_no_file_does_not_hold_a_bundle_up(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    out = tmp_path / "b.tar.gz"
    logs = ("--log", "/dev/zero", "--log", str(tmp_path / "pipe"), "--log", str(tmp_path))
    assert run(FakeClient(), "support-bundle", "-o", str(out), *logs).status == 0
    assert max(map(len, contents(out).values())) <= 4_000_000


# --- completion -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("swap", "po"), ["policy"]),
        (("swap", "x"), []),
        (("history", ""), ["policy"]),
        (("trace", ""), ["policy"]),
        (("evict", "policy", "--replica", ""), ["a"]),
        (("evict", "policy", "--replica", "b"), []),
    ],
)
def test_a_shell_completes_the_names_that_the_daemon_knows(words, found):
    assert complete(FakeClient(), *words) == found
    assert complete(TransportError("no daemon runs"), *words) == []


@pytest.mark.parametrize("name", ["$(reboot)", "a;b", "a b", "it's", "`x`", "-n", "~root", "a\x1b[2J", "*"])
def test_a_name_that_a_shell_would_obey_is_not_completed(name, monkeypatch):
    client = FakeClient()
    known = client.status()
    both = structs.replace(known, models=(*known.models, structs.replace(known.models[0], model=name)))
    monkeypatch.setattr(client, "status", lambda **_: both)
    assert complete(client, "verify", "") == ["policy"]


def complete(client: object, *words: str) -> list[str]:
    from click.shell_completion import ShellComplete

    from refitd_cli.control import main
    from refitd_cli.session import Session
    from tests.support.cli import answer

    shell = ShellComplete(main, {"obj": Session(lambda address: answer(client))}, "refitctl", "_REFITCTL_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]
