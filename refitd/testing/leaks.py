"""Find and count what processes hold (descendants, descriptors, files), to name leaks after a fault."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path


def processes_of(mark: str) -> dict[int, str]:
    """Return {pid: command line} of the processes that have `mark` in their initial environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            is_ours = mark.encode() in (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if is_ours and command:  # a zombie has no command line
                found[int(entry.name)] = command
    return found


def kill_all(mark: str) -> None:
    """Kill the processes that have `mark` in their initial environment."""
    for pid in processes_of(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descriptors(pid: int) -> Counter[str]:
    """Return how many descriptors of each kind a process has open."""
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found[_kind(os.readlink(fd))] += 1
    return found


def _kind(link: str) -> str:
    if link.startswith("/memfd:"):
        return "memfd"
    kind = link.partition(":")[0]
    return kind if kind in ("socket", "pipe", "anon_inode") else "file"


def own_memory_files() -> list[str]:
    """Return the links of refitd's arenas that this process still has open."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:refitd" in (link := os.readlink(fd)):
                found.append(link)
    return found


def files_in(folder: Path) -> list[str]:
    """Return the names in a runtime directory, except the journal, which is meant to stay."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("journal"))


def files(folders: Mapping[str, Path]) -> dict[str, int]:
    """Return the number of files and folders below each folder, except journals."""
    found = {}
    for name, folder in folders.items():
        with contextlib.suppress(OSError):
            found[f"files of {name}"] = sum(not p.name.startswith("journal") for p in folder.rglob("*"))
    return found


def more(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return a text for each count that has grown."""
    return [
        f"{what}: {now[what]}, was {before.get(what, 0)}" for what in sorted(now) if now[what] > before.get(what, 0)
    ]
