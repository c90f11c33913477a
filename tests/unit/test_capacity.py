"""A requested size is compared with every limit before anything is allocated; the refusal contains the numbers."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd.buffers import arena, capacity
from refitd.errors import ArenaError

MIB = 1 << 20


@contextlib.contextmanager
def soft_limit(which: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def node(tmp_path: Path) -> tuple[Path, Path]:
    """A made-up /proc with 1000 MiB available, and an empty /sys/fs/cgroup."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 9999999 kB\nMemAvailable:   {1000 << 10} kB\nHugePages_Total: 0\n")
    return tmp_path / "proc", tmp_path / "cgroup"


def test_without_control_groups_the_kernels_estimate_counts(node: tuple[Path, Path]) -> None:
    assert [(limit.name, limit.left) for limit in capacity.memory_limits(*node)] == [
        ("MemAvailable (/proc/meminfo)", 1000 * MIB)
    ]


def test_the_tightest_control_group_above_this_process_comes_first(node: tuple[Path, Path]) -> None:
    proc, groups = node
    write(proc / "self/cgroup", "0::/jobs/one\n")
    write(groups / "memory.max", "max\n")
    write(groups / "jobs/memory.max", f"{300 * MIB}\n")
    write(groups / "jobs/memory.current", f"{200 * MIB}\n")
    # half of the used memory is page cache of files, which the kernel frees for arenas
    write(groups / "jobs/memory.stat", f"anon 7\ninactive_file {60 * MIB}\nactive_file {40 * MIB}\n")
    write(groups / "jobs/one/memory.max", f"{250 * MIB}\n")
    write(groups / "jobs/one/memory.current", f"{10 * MIB}\n")
    found = [(limit.name, limit.left // MIB) for limit in capacity.memory_limits(proc, groups)]
    assert found == [
        ("memory.max of control group /jobs", 200),
        ("memory.max of control group /jobs/one", 240),
        ("MemAvailable (/proc/meminfo)", 1000),
    ]


def test_version_1_groups_count_too_and_their_way_to_say_unlimited(node: tuple[Path, Path]) -> None:
    proc, groups = node
    write(proc / "self/cgroup", "5:cpu:/x\n4:hugetlb,memory:/job\n0::/\n")
    write(groups / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(groups / "memory/memory.usage_in_bytes", "5\n")
    write(groups / "memory/job/memory.limit_in_bytes", f"{30 * MIB}\n")
    write(groups / "memory/job/memory.usage_in_bytes", f"{31 * MIB}\n")
    tightest, *others = capacity.memory_limits(proc, groups)
    assert (tightest.left, tightest.name) == (0, "memory.limit_in_bytes of control group /job")
    assert len(others) == 1


def test_a_container_sees_its_own_group_at_the_root(node: tuple[Path, Path]) -> None:
    proc, groups = node
    write(proc / "self/cgroup", "0::/../elsewhere\n")
    write(groups / "memory.max", f"{50 * MIB}\n")
    write(groups / "memory.current", "0\n")
    assert capacity.memory_limits(proc, groups)[0].left == 50 * MIB


def test_strict_overcommit_is_a_limit_of_its_own(node: tuple[Path, Path]) -> None:
    proc, groups = node
    with (proc / "meminfo").open("a") as meminfo:
        meminfo.write(f"CommitLimit: {100 << 10} kB\nCommitted_AS: {70 << 10} kB\n")
    write(proc / "sys/vm/overcommit_memory", "2\n")
    assert str(capacity.memory_limits(proc, groups)[0]) == f"{30 * MIB} bytes under vm.overcommit_memory=2"


def test_several_arenas_are_refused_together_before_one_is_made() -> None:
    share = capacity.memory_limits()[0].left // 2
    with pytest.raises(ArenaError, match=rf"3 arenas \('a' and so on\): {3 * share} bytes asked for, \d+ bytes"):
        capacity.check_bytes([(share, name) for name in "abc"])


def test_a_limit_on_file_sizes_holds_for_each_arena_and_not_for_their_sum() -> None:
    with soft_limit(resource.RLIMIT_FSIZE, 3 * MIB):
        capacity.check_bytes([(2 * MIB, "a"), (2 * MIB, "b")])
        with pytest.raises(ArenaError, match=rf"{4 * MIB} bytes asked for, {3 * MIB} bytes .* RLIMIT_FSIZE"):
            capacity.check_bytes([(4 * MIB, "a")])


def test_address_space_must_hold_the_arenas_that_workers_have_mapped() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with soft_limit(resource.RLIMIT_AS, mapped + 512 * MIB):
        capacity.check_bytes([(64 * MIB, "a")])
        with pytest.raises(ArenaError, match=rf"{64 * MIB} bytes asked for, \d+ bytes available under RLIMIT_AS"):
            capacity.check_bytes([(64 * MIB, "a")], held=500 * MIB)


def test_descriptors_are_counted_for_every_worker_that_may_start_anew() -> None:
    used = capacity.open_descriptors()
    with soft_limit(resource.RLIMIT_NOFILE, used + capacity.DESCRIPTOR_RESERVE + 11):
        assert capacity.descriptors_left() == capacity.DESCRIPTOR_RESERVE + 11
        capacity.check_descriptors([(1, "a")], held=4, workers=2)  # 1 to hold, 5 arenas for 2 workers
        with pytest.raises(ArenaError, match=rf"13 more file descriptors needed .* {used} are open, .* the limit is"):
            capacity.check_descriptors([(1, "a")], held=5, workers=2)


def test_an_arena_the_kernel_refuses_halfway_is_given_back_and_the_limits_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena, "check_bytes", lambda wanted: None)  # a limit that was not there a moment ago
    before = sorted(os.listdir("/proc/self/fd"))
    with soft_limit(resource.RLIMIT_FSIZE, MIB), pytest.raises(ArenaError) as refused:
        arena.create(2 * MIB, "late")
    text = str(refused.value)
    assert f"arena 'late': {2 * MIB} bytes asked for, the kernel said 'File too large' after 0" in text
    assert "MemAvailable" in text and f"{MIB} bytes under RLIMIT_FSIZE" in text
    assert sorted(os.listdir("/proc/self/fd")) == before
    os.close(arena.create(2 * MIB, "late"))


def test_an_arena_that_cannot_be_mapped_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "check_bytes", lambda wanted: None)
    before = sorted(os.listdir("/proc/self/fd"))
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with soft_limit(resource.RLIMIT_AS, mapped + 32 * MIB), pytest.raises(ArenaError, match=r"mapped: .*ulimit -v"):
        arena.create(64 * MIB, "wide")
    assert sorted(os.listdir("/proc/self/fd")) == before
