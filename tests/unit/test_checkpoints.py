"""Folders of safetensors: strict reading that names each fault; writing is complete or has no effect."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from refitd.checkpoints import writing as placing
from refitd.checkpoints.publish import Reader
from refitd.checkpoints.safetensors import (
    INDEX,
    NAMES,
    WHOLE,
    Checkpoint,
    header,
    in_file_order,
    open_folder,
    part_of,
    read_header,
)
from refitd.checkpoints.safetensors import read_folder as read_opened
from refitd.checkpoints.save import split
from refitd.checkpoints.writing import Safetensors, new_folder, write_file
from refitd.errors import CheckpointError
from refitd_cli.commands.checkpoints import bytes_of
from refitd_cli.control import main as refitctl

A, B = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


def read_folder(path: Path) -> Checkpoint:
    return read_opened(open_folder(path))


def raw(said: object, data: bytes = b"") -> bytes:
    """Return a file with this header, which may be invalid."""
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards of two tensors each, and their index."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    weights = {}
    for file, names in ((A, ("a", "b")), (B, ("c", "d"))):
        save_file({name: torch.full((3,), float(ord(name))) for name in names}, folder / file)
        weights |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": weights}))
    (folder / "config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"nobody reads it")
    return folder


def reindex(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    said = json.loads((folder / INDEX).read_text())
    change(said["weight_map"])
    (folder / INDEX).write_text(json.dumps(said))


# --- what is read -----------------------------------------------------------------------------------------


def test_a_header_is_byte_for_byte_what_the_formats_own_library_writes(tmp_path: Path) -> None:
    wanted = {f"{dtype}.{len(shape)}": (shape, dtype) for dtype in NAMES.values() for shape in ((), (2, 3), (0, 4))}
    wanted['é "quoted"\n'] = ((1,), "float32")
    tensors = {n: torch.zeros(s, dtype=torch.uint8).to(getattr(torch, t)) for n, (s, t) in wanted.items()}
    path = tmp_path / WHOLE
    save_file(tensors, path, metadata={"format": "pt"})
    ours = header(in_file_order(wanted))
    assert path.read_bytes()[: len(ours)] == ours
    with open_folder(tmp_path) as opened:
        found = read_header(opened.files[WHOLE])
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == wanted


def test_tensors_are_mapped_as_they_were_saved_even_where_another_library_left_them_unaligned(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    said = {"n": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}} | one(offsets=(1, 9))
    (tmp_path / WHOLE).write_bytes(raw(said, b"\x07" + values.numpy().tobytes()))
    with Reader(read_folder(tmp_path)) as reader:
        read = {name: tensor.load() for name, tensor in reader.read()}
    assert torch.equal(read["w"], values) and read["n"].tolist() == [7]


def test_shards_are_read_with_their_index_and_other_files_are_let_be(sharded: Path) -> None:
    checkpoint = read_folder(sharded)
    assert [(file, name) for file, name, _ in checkpoint.tensors()] == [(A, "a"), (A, "b"), (B, "c"), (B, "d")]
    assert checkpoint.nbytes == 48
    done: list[int] = []
    with Reader(checkpoint) as reader:
        assert {name: tensor.load()[0].item() for name, tensor in reader.read(done.append)} == {
            n: ord(n) for n in "abcd"
        }
    assert sum(done) == 48


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(b"", "truncated or no safetensors", id="empty"),
        pytest.param(b"\x99" * 64, "truncated or no safetensors", id="another format"),
        pytest.param(raw(one(), bytes(8))[:40], "truncated or no safetensors", id="ends in its header"),
        pytest.param(raw(one(), bytes(5)), "it is truncated", id="ends in its data"),
        pytest.param(raw(one(), bytes(9)), "something follows", id="longer"),
        pytest.param(raw(b"{]"), "damaged", id="no JSON"),
        pytest.param(raw(b"\xff\xfe"), "damaged", id="no text"),
        pytest.param(raw(b"[" * 100_000), "damaged", id="nested"),
        pytest.param(raw([]), "expected an object", id="a list"),
        pytest.param(raw(b'{"w":{},"w":{}}'), "'w' (str) is in it twice", id="twice"),
        pytest.param(raw({"w": 3}), "'w': it is described as 3", id="no description"),
        pytest.param(raw(one("F4"), bytes(8)), "'w': its dtype is 'F4'", id="unknown dtype"),
        pytest.param(raw(one(shape=(-2,)), bytes(8)), "'w': its shape", id="negative"),
        pytest.param(raw(one(shape=(True, 2)), bytes(8)), "'w': its shape", id="a bool"),
        pytest.param(raw(one(shape=(3,)), bytes(8)), "'w': it has 8 bytes, its shape (3,) of F32 takes 12", id="shape"),
        pytest.param(raw(one(offsets=(8, 0)), bytes(8)), "'w': its data_offsets", id="backwards"),
        pytest.param(raw(one(offsets=(4, 12)), bytes(12)), "'w': its bytes leave a hole", id="hole"),
        pytest.param(raw(one() | {"v": one()["w"]}, bytes(8)), "overlap", id="overlap"),
    ],
)
def test_a_damaged_file_is_refused_by_name_with_what_is_wrong(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / WHOLE
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_folder(tmp_path)
    assert str(path) in str(caught.value) and words in str(caught.value)


def empty(folder: Path) -> None:
    for each in folder.iterdir():
        each.unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    f"{B}: missing, and the index lists it": lambda folder: (folder / B).unlink(),
    f"it has {A}, {B}, expected {WHOLE} alone": lambda folder: (folder / INDEX).unlink(),
    f"{B}: its tensors end at byte": lambda folder: os.truncate(folder / B, (folder / B).stat().st_size - 1),
    f"'a': it is in {A} and in {B}": lambda folder: save_file({name: torch.zeros(3) for name in "acd"}, folder / B),
    "model-00003-of-00003.safetensors: no tensor of the index is in it": lambda folder: shutil.copy(
        folder / B, folder / "model-00003-of-00003.safetensors"
    ),
    f"{WHOLE}: no tensor of the index is in it": lambda folder: shutil.copy(folder / B, folder / WHOLE),
    f"{B}, and not in the index": lambda folder: reindex(folder, lambda weights: weights.pop("d")),
    f"'a': the index says that it is in {B}, and it is not; it is in {A}": lambda folder: reindex(
        folder, lambda weights: weights.update(a=B)
    ),
    "'a' is said to be in '../model.safetensors'": lambda folder: reindex(
        folder, lambda weights: weights.update(a="../model.safetensors")
    ),
    "its weight_map is None": lambda folder: (folder / INDEX).write_text('{"metadata": {}}'),
    f"{INDEX}: it is damaged": lambda folder: (folder / INDEX).write_text('{"weight_map": {"a"'),
    "'a' (str) is in it twice": lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'),
    "it has no file of weights": empty,
    "No such file or directory": shutil.rmtree,
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_folder_whose_files_do_not_belong_together_is_refused_by_name(sharded: Path, words: str) -> None:
    DAMAGES[words](sharded)
    with pytest.raises(CheckpointError) as caught:
        read_folder(sharded)
    assert words in str(caught.value)


@pytest.mark.parametrize("size", [0, 60_000])
def test_a_file_that_shrinks_or_grows_while_it_is_read_is_an_error_and_not_a_signal(tmp_path: Path, size: int) -> None:
    save_file({"a": torch.zeros(5000), "b": torch.zeros(5000)}, tmp_path / WHOLE)
    with Reader(read_folder(tmp_path)) as reader:
        reading = reader.read()
        next(reading)
        os.truncate(tmp_path / WHOLE, size)
        with pytest.raises(CheckpointError, match=f"{WHOLE}: it was changed while it was read"):
            list(reading)


# Truncates a file after the first piece of its tensor was read.
TRUNCATED = """
import os, sys
from pathlib import Path
import torch
from refitd.checkpoints.safetensors import open_folder, read_folder
from refitd.checkpoints.publish import Reader
from refitd.errors import CheckpointError
file = Path(sys.argv[1])
with Reader(read_folder(open_folder(file.parent))) as reader:
    try:
        for name, tensor in reader.read(lambda nbytes: os.truncate(file, 1000)):
            tensor.read_into(torch.empty(tensor.shape))
    except CheckpointError as exc:
        print(exc)
"""


def test_a_file_that_is_truncated_while_a_tensor_is_copied_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(5_000_000)}, tmp_path / WHOLE)
    command = [sys.executable, "-c", TRUNCATED, str(tmp_path / WHOLE)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert f"{WHOLE}: it was changed while it was read" in ran.stdout


def test_parts_of_a_folder_are_all_of_it_once_and_equal_in_bytes(sharded: Path) -> None:
    checkpoint = read_folder(sharded)
    for count in (1, 2, 3, 4, 7):
        parts = [part_of(checkpoint, rank, count) for rank in range(count)]
        assert sorted(name for part in parts for _, name, _ in part.tensors()) == ["a", "b", "c", "d"]
        assert sum(part.nbytes for part in parts) == 48
    assert [part_of(checkpoint, rank, 2).files.keys() for rank in range(2)] == [{A}, {B}]


# --- what is written --------------------------------------------------------------------------------------


def test_tensors_are_dealt_to_files_up_to_a_size_and_a_larger_one_is_alone() -> None:
    wanted = {"a": ((4,), "uint8"), "b": ((4,), "uint8"), "c": ((9,), "uint8"), "d": ((1,), "int64")}
    assert [list(shard) for shard in split(wanted, 8)] == [["a", "b"], ["c"], ["d"]]
    assert [list(shard) for shard in split(wanted, 100)] == [["d", "a", "b", "c"]]  # wide types first
    assert Safetensors().file_names(1) == [WHOLE]
    assert Safetensors().file_names(2) == [A, B]


def test_a_folder_is_there_when_it_is_whole_and_readable_by_the_formats_own_library(tmp_path: Path) -> None:
    place = tmp_path / "out"
    with new_folder(place, 100) as folder:
        assert not place.exists() and folder.parent == tmp_path
        write_file(folder / WHOLE, header({"w": ((2,), "float32")}), [memoryview(bytes(8))])
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    with safetensors.safe_open(place / WHOLE, "pt") as opened:
        assert torch.equal(opened.get_tensor("w"), torch.zeros(2)) and opened.metadata() == {"format": "pt"}


def test_an_older_checkpoint_gives_way_in_one_step_and_keeps_what_is_no_weights(sharded: Path) -> None:
    (sharded / "extra").mkdir()
    (sharded / "extra" / "tokenizer.txt").write_text("hello")
    with new_folder(sharded, 0) as folder:
        write_file(folder / WHOLE, header({"w": ((), "uint8")}), [memoryview(b"\1")])
        assert read_folder(sharded).nbytes == 48  # until the end
    assert sorted(each.name for each in sharded.iterdir()) == [
        "adapter_model.safetensors",
        "config.json",
        "extra",
        WHOLE,
    ]
    assert (sharded / "extra" / "tokenizer.txt").read_text() == "hello"
    assert [each.name for each in sharded.parent.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_is_left_of_a_folder_that_was_not_finished(sharded: Path, raised: BaseException) -> None:
    with pytest.raises(type(raised)), new_folder(sharded, 0) as folder:
        write_file(folder / WHOLE, b"half of ")
        raise raised
    assert read_folder(sharded).nbytes == 48
    assert [each.name for each in sharded.parent.iterdir() if each.name.startswith(".")] == []


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"1,000,000,000,000,000 bytes are to be written, and .* has [\d,]+ free"),
        new_folder(tmp_path / "out", 10**15),
    ):
        pytest.fail("there is no room")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_writing_is_named() -> None:
    with pytest.raises(CheckpointError, match="No space left on device; nothing of it is left"), placing._told(Path()):
        Path("/dev/full").write_text("x")


def test_a_place_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("dear")
    for place, words in (
        (tmp_path / "file", "it is a file"),
        (tmp_path / "home", "not empty and no checkpoint"),
        (tmp_path / "no" / "parent", "there is no such folder"),
        (Path("/proc"), "a disk is mounted there"),
    ):
        with pytest.raises(CheckpointError, match=words), new_folder(place, 0):
            pytest.fail("it cannot be used")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "home"]


def test_a_file_system_that_cannot_exchange_folders_keeps_the_older_one(sharded: Path, monkeypatch) -> None:
    def refuse(*_: object) -> int:
        placing.ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(placing._libc, "renameat2", refuse)
    with pytest.raises(CheckpointError, match="save to a folder that is not there yet"), new_folder(sharded, 0):
        pass
    assert read_folder(sharded).nbytes == 48


def test_what_a_killed_writer_has_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    left = tmp_path / ".out.saving-killed"
    left.mkdir()
    (left / WHOLE).write_bytes(b"half")
    with new_folder(tmp_path / "out", 0) as first:
        assert not left.exists()
        with new_folder(tmp_path / "out", 0) as second:
            assert first.exists()
            write_file(second / WHOLE, b"")
        write_file(first / WHOLE, b"x")
    assert (tmp_path / "out" / WHOLE).read_bytes() == b"x"


@pytest.mark.parametrize(("text", "nbytes"), [("7", 7), ("9kB", 9000), ("1.5G", 1_500_000_000), ("2 MB", 2_000_000)])
def test_a_size_on_the_command_line_is_bytes(text: str, nbytes: int) -> None:
    assert bytes_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1GB", "5 apples", "1e9"])
def test_what_is_no_size_is_a_wrong_argument(text: str) -> None:
    ran = CliRunner().invoke(refitctl, ["save", "policy", "-o", "x", "--max-shard-size", text], prog_name="refitctl")
    assert ran.exit_code == 2 and "is no size; give bytes, or 500MB, 5GB" in ran.stderr
