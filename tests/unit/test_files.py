"""Files that a user names: a FIFO, a device or a socket there is refused, without a wait."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from refitd.config import MAX_CONFIG_BYTES, EtcdConfig, EtcdPlace, load
from refitd.coordinator.journals.file import FileJournal
from refitd.coordinator.journals.gateway import Gateway
from refitd.errors import CommitError, ConfigError
from refitd.offline.files import read_file
from refitd.protocol import keys
from refitd_cli.bundle import _end


def _fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


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
    [(_fifo, "a FIFO"), (_socket, "a socket"), (_device, "a character device"), (Path.mkdir, "a directory")],
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
