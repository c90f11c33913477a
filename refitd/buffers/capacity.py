"""Compute how much more memory and how many descriptors this process can get, and which limit applies."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from refitd.errors import ArenaError, RefusedError

# Arenas never use this reserve: when a control group is full, the kernel kills the next process that allocates.
MEMORY_RESERVE = 64 << 20

# Descriptors that a client opens to connect (two sockets and ZeroMQ's own), and that a server opens before it serves.
CLIENT_DESCRIPTORS = 12
SERVER_DESCRIPTORS = 40

# Reserved for clients that connect, descriptors in transit and jobs that are sent to workers.
DESCRIPTOR_RESERVE = 32

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Limit:
    """`left` bytes are available under the limit `name`; `advice` says how to get more."""

    name: str
    left: int
    advice: str
    per_arena: bool = False  # applies to each arena, not to their sum

    def __str__(self) -> str:
        return f"{self.left} bytes under {self.name}"


def memory_limits(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> list[Limit]:
    """Return every memory limit of this node and of this process's control groups, the tightest first.

    Raises:
        ArenaError: the kernel does not say how much memory is available.
    """
    info = _fields((proc / "meminfo").read_text())
    if "MemAvailable" not in info:
        raise ArenaError("/proc/meminfo has no MemAvailable; refitd needs Linux 3.14 or newer")
    found = [Limit("MemAvailable (/proc/meminfo)", info["MemAvailable"] << 10, "free memory on this node")]
    if _read(proc / "sys/vm/overcommit_memory").strip() == "2":
        left = (info.get("CommitLimit", 0) - info.get("Committed_AS", 0)) << 10
        found.append(Limit("vm.overcommit_memory=2", left, "raise vm.overcommit_ratio"))
    for line in _read(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found += _groups(path, cgroups, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            found += _groups(path, cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return sorted((Limit(f.name, max(0, f.left), f.advice) for f in found), key=lambda limit: limit.left)


def process_limits(held: int = 0) -> list[Limit]:
    """Return this process's own limits for one arena: file size and address space.

    `held` bytes of arenas are subtracted from the address space, in addition to this process's mappings, because a
    worker maps all arenas.
    """
    found = []
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_size != resource.RLIM_INFINITY:
        advice = "raise `ulimit -f` or LimitFSIZE= of the daemon"
        found.append(Limit("RLIMIT_FSIZE (each arena)", file_size, advice, per_arena=True))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        mapped = int(_read(_PROC / "self/statm").split()[0]) * resource.getpagesize()
        left = max(0, space - mapped - held)
        found.append(Limit("RLIMIT_AS (address space)", left, "raise `ulimit -v` or LimitAS= of the daemon"))
    return found


def check_bytes(wanted: Sequence[tuple[int, str]], held: int = 0) -> None:
    """Refuse arenas, (bytes, label) each, that do not fit together. This only checks; it does not allocate.

    Args:
        wanted: the arenas to allocate.
        held: bytes of existing arenas, which this process's workers have mapped.

    Raises:
        ArenaError: names the request, the available bytes, the limit and how to raise it.
    """
    total, largest = sum(nbytes for nbytes, _ in wanted), max(nbytes for nbytes, _ in wanted)
    tightest = memory_limits()[0]
    memory = Limit(tightest.name, max(0, tightest.left - MEMORY_RESERVE), tightest.advice)
    over = [
        (limit, asked)
        for limit in [memory, *process_limits(held)]
        if (asked := largest if limit.per_arena else total) > limit.left
    ]
    for limit, asked in over:
        could_be_freed = not any(other.per_arena for other, _ in over)
        raise ArenaError(
            f"{named(wanted)}: {asked} bytes asked for, {limit.left} bytes available under {limit.name}; "
            f"{limit.advice}, register a smaller shard here, or lower `slots`",
            short=max(more - other.left for other, more in over) if could_be_freed else 0,
        )


def check_descriptors(wanted: Sequence[tuple[int, str]], held: int, workers: int) -> None:
    """Refuse arenas that would leave this process too few descriptors.

    An arena takes one descriptor, and one more for each worker that is restarted while the arena exists.

    Args:
        wanted: the arenas to allocate, as in `check_bytes`.
        held: number of existing arenas.
        workers: number of workers that need all of them.

    Raises:
        ArenaError: names the open and the needed descriptors, the limit and how to raise it.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    used = open_descriptors()
    needed = len(wanted) + (held + len(wanted)) * workers
    if used + needed + DESCRIPTOR_RESERVE > limit:
        raise ArenaError(
            f"{named(wanted)}: {needed} more file descriptors needed to hold {len(wanted)} and hand "
            f"{held + len(wanted)} arenas to {workers} workers, {used} are open, {DESCRIPTOR_RESERVE} are kept free, "
            f"the limit is {limit} (RLIMIT_NOFILE); raise `ulimit -Hn` or LimitNOFILE= of the daemon, lower `slots`, "
            "or close registrations"
        )


def require_descriptors(needed: int, who: str, *, raised: bool = True) -> None:
    """Refuse to start if descriptors would run out later, because libraries then end the process instead of failing.

    Args:
        needed: how many descriptors will be opened.
        who: name of the program that starts, for the error.
        raised: whether the soft limit applies. If False, the hard limit applies, because the soft limit will be raised
            to it.

    Raises:
        RefusedError: names the limit, the open descriptors and how to raise the limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0 if raised else 1]
    if limit == resource.RLIM_INFINITY:
        return
    try:
        used = open_descriptors()
    except OSError:  # listing them takes a descriptor
        used = limit
    if used + needed > limit:
        raise RefusedError(
            f"{who} needs {needed} file descriptors, {used} are open and the limit is {limit} (RLIMIT_NOFILE); "
            "raise `ulimit -n`"
        )


def open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd")) - 1  # without the one used for listing


def descriptors_left() -> int:
    """Return how many more descriptors this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit - open_descriptors() if limit != resource.RLIM_INFINITY else 1 << 30


def raise_descriptor_limit() -> tuple[int, int]:
    """Raise this process's soft limit on descriptors to the hard limit; return (old, new) soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the hard limit may be above the kernel's present maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def named(wanted: Sequence[tuple[int, str]]) -> str:
    """Return a name for these arenas, (bytes, label) each, for errors."""
    return f"arena {wanted[0][1]!r}" if len(wanted) == 1 else f"{len(wanted)} arenas ({wanted[0][1]!r} and so on)"


def _groups(path: str, mount: Path, limit: str, usage: str, prefix: str) -> Iterator[Limit]:
    """Yield each limit that is set on a control group from `path` up to the root of the mount."""
    inside = PurePosixPath(path.lstrip("/"))
    # if the path leads out of this namespace, only the root of the mount applies
    here = [] if ".." in inside.parts else [inside, *inside.parents]
    for group in dict.fromkeys([*here, PurePosixPath()]):
        folder = mount / group
        most, now = _read(folder / limit).strip(), _read(folder / usage).strip()
        if not most.isdigit() or not now.isdigit() or int(most) >= 1 << 62:
            continue  # no limit ("max", in version 1 a huge number), or the controller is not enabled here
        stat = _fields(_read(folder / "memory.stat"))
        # the kernel drops the page cache of files first; memory files are not part of it
        cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
        name = f"{limit} of control group /{'' if group == PurePosixPath() else group}"
        yield Limit(name, int(most) - max(0, int(now) - cache), "raise that limit (MemoryMax= of a unit, or the job's)")


def _fields(text: str) -> dict[str, int]:
    """Return the numbers of `name: 12 kB` or `name 12` lines, without unit conversion."""
    rows = (line.replace(":", " ").split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
