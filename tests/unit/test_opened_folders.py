"""Checkpoint folders that change while they are read: every accepted read is one whole checkpoint."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from refitd.checkpoints import opened as opening
from refitd.checkpoints.publish import Reader, read_checkpoint
from refitd.checkpoints.safetensors import INDEX, METADATA, WHOLE
from refitd.errors import CheckpointError
from refitd.files import open_regular

SHARDS = tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
TENSORS = 6
READS = 60


def values(number: int) -> dict[str, torch.Tensor]:
    """Return checkpoint `number`, which determines all elements. Odd ones store the tensors in another order."""
    names = [f"t{i}" for i in range(TENSORS)]
    return {name: torch.full((300,), float(100 * number + int(name[1:]))) for name in names}


def make(folder: Path, number: int, layout: str = "sharded") -> Path:
    """Write checkpoint `number`. `layout`: whole, sharded (the shards of odd numbers hold other tensors) or dcp."""
    folder.mkdir(parents=True)
    tensors = values(number)
    if layout == "dcp":
        dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    elif layout == "whole":
        save_file(tensors, folder / WHOLE)
    else:
        index = {}
        for i, file in enumerate(SHARDS):
            held = [f"t{(2 * i + k + number % 2) % TENSORS}" for k in range(2)]
            save_file({name: tensors[name] for name in held}, folder / file)
            index |= dict.fromkeys(held, file)
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    with Reader(read_checkpoint(folder, None)) as reader:
        return {name: tensor.load() for name, tensor in reader.read()}


def number_of(found: dict[str, torch.Tensor]) -> int:
    """Return the checkpoint's number; raise AssertionError if tensors are of several checkpoints or misnamed."""
    number = int(found["t0"][0]) // 100
    expected = values(number)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected), {n: t[0] for n, t in found.items()}
    return number


LAYOUTS = ["whole", "sharded", pytest.param("dcp", marks=pytest.mark.filterwarnings("ignore"))]


# --- races ------------------------------------------------------------------------------------------------

# Replaces a folder by one of several others, again and again, until stdin ends; in one of the ways that tools use.
WRITER = """
import ctypes, itertools, os, select, shutil, sys, time
place, how, *others = sys.argv[1:]
libc = ctypes.CDLL(None)
def exchange(a, b):
    assert libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0
print("ready", flush=True)
for turn in itertools.count():
    if select.select([0], [], [], 0)[0]:
        break
    other = others[turn % len(others)]
    if how == "exchange":      # refitctl save
        exchange(place, other)
    elif how == "symlink":
        os.symlink(other, place + ".new")
        os.replace(place + ".new", place)
    elif how == "rename":      # the folder is missing for a moment
        os.rename(place, place + ".old")
        shutil.copytree(other, place)
        shutil.rmtree(place + ".old")
    elif how == "rsync":       # file by file, each under a hidden name first
        for name in sorted(os.listdir(other)):
            beside = os.path.join(place, "." + name + ".aB3dE6")
            shutil.copy2(os.path.join(other, name), beside)
            os.replace(beside, os.path.join(place, name))
    elif how == "in place":    # cp, rsync --inplace
        for name in sorted(os.listdir(other)):
            shutil.copy2(os.path.join(other, name), os.path.join(place, name))
    time.sleep(0.13 * (turn % 3))
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started = []

    def start(place: Path, how: str, others: list[Path]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITER, str(place), how, *map(str, others)]
        popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(popen)
        assert popen.stdout is not None and popen.stdout.readline() == "ready\n"
        return popen

    yield start
    for popen in started:
        popen.communicate(timeout=30)


@pytest.mark.parametrize("how", ["exchange", "symlink", "rename", "rsync", "in place"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_read_of_a_folder_that_is_replaced_is_one_checkpoint_or_refused(
    tmp_path: Path, writer: Callable[..., subprocess.Popen[str]], layout: str, how: str
) -> None:
    others = [make(tmp_path / f"c{number}", number, layout) for number in (1, 2, 3)]
    place = tmp_path / "live"
    if how == "symlink":
        place.symlink_to(others[0])
    else:
        shutil.copytree(others[0], place)
    process = writer(place, how, others)
    accepted, refused = [], set()
    for _ in range(READS):
        try:
            accepted.append(number_of(read(place)))
        except CheckpointError as exc:
            refused.add(str(exc))
    assert process.poll() is None
    assert all(str(tmp_path) in text or "index" in text for text in refused)
    assert accepted or refused


# --- each way to change a folder --------------------------------------------------------------------------


def _same_size_and_time(folder: Path) -> None:
    path = folder / SHARDS[1]
    was = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda folder: (folder.rename(folder.with_name("old")), make(folder, 2)),
        "the folder was replaced while it was read; publish it again",
    ),
    (
        lambda folder: os.replace(shutil.copy2(folder / SHARDS[1], folder / "new"), folder / SHARDS[1]),
        f"{SHARDS[1]}: it was replaced while the folder was read; publish the folder again when",
    ),
    (_same_size_and_time, f"{SHARDS[1]}: it was changed while it was read"),
    (
        lambda folder: os.replace(shutil.copy(folder / INDEX, folder / "new"), folder / INDEX),
        f"{INDEX}: it was replaced while the folder was read",
    ),
    *(
        (lambda folder, name=name: (folder / name).touch(), f"{name}: it was added while the folder was read")
        for name in ("model-00004-of-00004.safetensors", f".{SHARDS[0]}.Xy12Zz")  # by a writer that begins
    ),
    (shutil.rmtree, "it can no longer be read: No such file or directory; publish a folder that stays there"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_folder_that_changed_while_it_was_read_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    folder = make(tmp_path / "c", 1)
    checkpoint = read_checkpoint(folder, None)
    with Reader(checkpoint) as reader:
        reading = reader.read()
        next(reading)
        change(folder)
        with pytest.raises(CheckpointError) as caught:
            list(reading)
    assert words in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_folder_that_changed_between_its_header_and_its_data_gives_no_data(
    tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    folder = make(tmp_path / "c", 1)
    checkpoint = read_checkpoint(folder, None)
    change(folder)
    with Reader(checkpoint) as reader, pytest.raises(CheckpointError) as caught:
        list(reader.read())
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "name", [f".{SHARDS[0]}.aB3dE6", f"..{METADATA[1:]}.aB3dE6", f"{METADATA}.tmp", "__0_0.distcp.tmp"]
)
def test_a_folder_in_which_a_writer_is_at_work_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "c", 1)
    (folder / name).touch()
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder, None)
    assert f"{folder / name}: a file that is being written" in str(caught.value)
    assert "or remove this file if the writer was killed" in str(caught.value)


def test_a_change_within_the_tick_of_an_earlier_change_is_seen(tmp_path: Path) -> None:
    """The kernel stamps both with one time, so the reader waits for the next tick before it relies on the stamps."""
    folder = make(tmp_path / "c", 1, "whole")
    for number in range(2, 8):
        save_file(values(number), folder / WHOLE)  # just now: its stamp is the current tick
        checkpoint = read_checkpoint(folder, None)
        was = os.stat(folder / WHOLE)
        with (folder / WHOLE).open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\1\2\3\4")
        assert os.stat(folder / WHOLE).st_ctime_ns != was.st_ctime_ns
        with Reader(checkpoint) as reader, pytest.raises(CheckpointError, match="it was changed while it was read"):
            list(reader.read())


def test_a_file_that_changed_long_ago_is_read_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "c", 1)
    slept: list[float] = []
    later = time.time() + 10
    monkeypatch.setattr(opening.time, "time", lambda: later)
    monkeypatch.setattr(opening.time, "sleep", slept.append)
    assert number_of(read(folder)) == 1 and slept == []


def test_a_symbolic_link_to_a_file_is_followed_and_watched(tmp_path: Path) -> None:
    blobs, folder = make(tmp_path / "blobs", 1, "whole"), tmp_path / "snapshot"
    folder.mkdir()
    (folder / WHOLE).symlink_to(blobs / WHOLE)
    assert number_of(read(folder)) == 1
    checkpoint = read_checkpoint(folder, None)
    (folder / "new").symlink_to(make(tmp_path / "other", 2, "whole") / WHOLE)
    os.replace(folder / "new", folder / WHOLE)
    with Reader(checkpoint) as reader, pytest.raises(CheckpointError, match="it was replaced"):
        list(reader.read())


# --- files that are not regular ---------------------------------------------------------------------------


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


KINDS: list[tuple[Callable[[Path], object], str]] = [
    (os.mkfifo, "a FIFO"),
    (_socket, "a socket"),
    (Path.mkdir, "a directory"),
    (lambda path: path.symlink_to("/dev/zero"), "a character device"),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("put", "what"), KINDS)
@pytest.mark.parametrize(
    ("layout", "name"),
    [("whole", WHOLE), ("sharded", INDEX), ("sharded", SHARDS[1]), ("dcp", METADATA), ("dcp", "__0_0.distcp")],
)
def test_a_file_that_is_not_regular_is_refused_by_name_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, name: str, put: Callable[[Path], None], what: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    folder = make(Path("c"), 1, layout)
    (folder / name).unlink()
    put(folder / name)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder, None)
    assert f"{folder / name}: it cannot be read: it is {what}, expected a regular file" in str(caught.value)


def test_a_fifo_that_takes_the_place_of_a_file_while_it_is_opened_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    regular = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
    with pytest.raises(OSError, match="it is a FIFO, expected a regular file"):
        open_regular(tmp_path / "fifo")


# --- descriptors ------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_descriptor_stays_open_whatever_happens(tmp_path: Path) -> None:
    folder, damaged = make(tmp_path / "c", 1), make(tmp_path / "d", 1)
    (damaged / SHARDS[0]).write_bytes(b"x")
    read(folder)
    before = descriptors()
    read(folder)
    with pytest.raises(CheckpointError):
        read(damaged)
    checkpoint = read_checkpoint(folder, None)
    del checkpoint
    assert descriptors() == before


# Reads a folder of 100 files with a limit of open files.
LIMITED = """
import resource, sys
from pathlib import Path
from refitd.checkpoints.publish import read_checkpoint
from refitd.checkpoints.publish import Reader
from refitd.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
try:
    with Reader(read_checkpoint(Path(sys.argv[1]), None)) as reader:
        print(len(list(reader.read())))
except CheckpointError as exc:
    print(exc)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "words"),
    [
        (
            64,
            64,
            "this process may have 64 open files (ulimit -n), and all files of the folder are open; raise that limit",
        ),
        (64, 4096, "100"),
    ],
)
def test_a_folder_of_more_files_than_may_be_open_is_read_or_refused(
    tmp_path: Path, soft: int, hard: int, words: str
) -> None:
    index = {}
    for i in range(100):
        file = f"model-{i + 1:05}-of-00100.safetensors"
        save_file({f"t{i}": torch.zeros(1)}, tmp_path / file)
        index[f"t{i}"] = file
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    hard = min(hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(soft), str(hard)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert words in ran.stdout, ran.stdout + ran.stderr[-2000:]


def test_a_process_without_a_free_descriptor_is_told_of_its_limit(tmp_path: Path) -> None:
    code = LIMITED.replace("try:", "held = [open('/dev/null') for _ in range(64 - 3)]\ntry:")
    make(tmp_path / "c", 1)
    command = [sys.executable, "-c", code, str(tmp_path / "c"), "64", "64"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert "this process may have 64 open files (ulimit -n)" in ran.stdout, ran.stdout + ran.stderr[-2000:]


def test_a_file_is_closed_after_its_last_tensor_and_cannot_be_read_again(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(make(tmp_path / "c", 1), None)
    with Reader(checkpoint) as reader:
        tensors = [tensor for _, (_, tensor) in zip(range(3), reader.read(), strict=False)]
        assert checkpoint.opened.files[SHARDS[1]].fd > 0
        with pytest.raises(ValueError, match=f"{SHARDS[0]}: it is closed; a checkpoint is read once"):
            tensors[0].load()
