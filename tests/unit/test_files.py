"""Files that a user names are regular ones; one daemon locks a directory."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from refitd import service
from refitd.config import MAX_CONFIG_BYTES, EtcdConfig, EtcdPlace, load
from refitd.coordinator.journals.file import FileJournal
from refitd.coordinator.journals.gateway import Gateway
from refitd.errors import CommitError, ConfigError, RefusedError
from refitd.files import read_file
from refitd.protocol import keys
from refitd.service import LOCK, DirectoryLock
from refitd_cli.commands.support_bundle import _end


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _gateway(**options: str) -> Gateway:
    return Gateway(EtcdPlace((("127.0.0.1", 1),), "/", tls="ca" in options), EtcdConfig(**options))


READERS: dict[str, Callable[[Path], object]] = {
    "configuration": lambda path: load(path, {}),
    "manifest": read_file,
    "key": keys.read,
    "list of keys": keys.read_list,
    "journal": FileJournal,
    "password of etcd": lambda path: _gateway(user="me", password_file=str(path)),
    "authority of etcd": lambda path: _gateway(ca=str(path)),
    "log of a bundle": lambda path: _end(str(path)),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("put", "what"),
    [
        (os.mkfifo, "a FIFO"),
        (_socket, "a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "a character device"),
        (Path.mkdir, "a directory"),
    ],
)
def test_a_file_that_is_not_regular_is_refused_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, put: Callable[[Path], None], what: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    put(Path("file"))
    with pytest.raises((ConfigError, CommitError, OSError), match=f"it is {what}, expected a regular file"):
        READERS[name](Path("file"))


def test_a_configuration_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "refitd.toml"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigError, match=f"cannot be read: it has more than {MAX_CONFIG_BYTES} bytes; pass --config"):
        load(path, {})


@pytest.mark.parametrize("command", ["refitd serve --config", "refitd coordinator --config"])
def test_a_command_whose_configuration_is_a_fifo_ends_with_an_error(tmp_path: Path, command: str) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    program, *arguments = command.split()
    started = [str(Path(sys.executable).with_name(program)), *arguments, str(path)]
    ran = subprocess.run(started, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode != 0 and "it is a FIFO, expected a regular file; pass --config FILE" in ran.stderr


# --- Daemons that lock one runtime directory: the second is refused, and the refusal names the first. ---


def test_a_refusal_names_the_owner(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    with pytest.raises(RefusedError, match=rf"\(pid {os.getpid()}\) is already listening"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


@pytest.mark.parametrize("before", [b"", b"4194305\n", b"what?"], ids=["new", "a dead predecessor", "garbage"])
def test_an_owner_that_has_not_written_its_id_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    (tmp_path / LOCK).write_bytes(before)
    with (tmp_path / LOCK).open("r+b", buffering=0) as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        # it writes while it is waited for
        monkeypatch.setattr(service.time, "sleep", lambda _: (owner.truncate(0), owner.write(b"1\n")))
        with pytest.raises(RefusedError, match=r"\(pid 1\) is already listening"):
            DirectoryLock(tmp_path)


def test_an_owner_that_never_writes_its_id_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_OWNER_S", 0.05)
    with (tmp_path / LOCK).open("wb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match=r"\(pid unknown\) is already listening"):
            DirectoryLock(tmp_path)


def test_an_owner_that_ends_while_it_is_asked_for_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = (tmp_path / LOCK).open("wb")
    fcntl.flock(owner, fcntl.LOCK_EX)
    monkeypatch.setattr(service.time, "sleep", lambda _: owner.close())
    DirectoryLock(tmp_path).release()
    assert owner.closed
