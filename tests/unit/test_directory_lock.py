"""Daemons that lock one runtime directory: who is refused, and whom the refusal names."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from refitd.errors import RefusedError
from refitd.protocol.directory import LOCK, DirectoryLock


def test_a_refusal_names_the_owner(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    with pytest.raises(RefusedError, match=rf"\(pid {os.getpid()}\) is already listening"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


@pytest.mark.parametrize("before", [b"", b"4194305\n", b"what?"], ids=["new", "a dead predecessor", "garbage"])
def test_an_owner_that_has_not_written_its_id_yet_is_waited_for(tmp_path: Path, before: bytes) -> None:
    (tmp_path / LOCK).write_bytes(before)
    with (tmp_path / LOCK).open("r+b", buffering=0) as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)

        def write_late() -> None:
            time.sleep(0.1)
            owner.truncate(0)
            owner.write(b"1\n")

        writer = threading.Thread(target=write_late)
        writer.start()
        with pytest.raises(RefusedError, match=r"\(pid 1\) is already listening"):
            DirectoryLock(tmp_path)
        writer.join()


def test_an_owner_that_never_writes_its_id_is_unknown(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("wb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match=r"\(pid unknown\) is already listening"):
            DirectoryLock(tmp_path)


def test_an_owner_that_ends_while_it_is_asked_for_is_replaced(tmp_path: Path) -> None:
    owner = (tmp_path / LOCK).open("wb")
    fcntl.flock(owner, fcntl.LOCK_EX)
    ends = threading.Timer(0.1, owner.close)
    ends.start()
    DirectoryLock(tmp_path).release()
    ends.join()
