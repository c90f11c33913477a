"""Folders of torch.distributed.checkpoint: read strictly and without running anything, each fault by name."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as said
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.filesystem import _StorageInfo

from refitd.checkpoints.publish import Reader, described, read_checkpoint
from refitd.checkpoints.safetensors import METADATA, part_of
from refitd.checkpoints.writing import Dcp, new_folder
from refitd.errors import CheckpointError
from refitd.testing import oracle

FILES = "__0_0.distcp", "__1_0.distcp"
WHOLE = torch.arange(35.0).view(7, 5)
#  rows 0:4 and 4:7, the second ones cut at column 2
BOXES = [((0, 0), (4, 5)), ((4, 0), (3, 2)), ((4, 2), (3, 3))]

Change = Callable[[said.Metadata, Path], object]


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def made(path: Path, change: Change = lambda metadata, path: None) -> Path:
    """A folder of two ranks: a tensor in three chunks, a whole one, a step count; `change` damages it."""
    path.mkdir()
    content = {file: bytearray(b"?" * 3) for file in FILES}  # 3 bytes in front, so no tensor is aligned
    entries: dict[str, Any] = {"model.w": tensor_entry(WHOLE, BOXES), "model.b": tensor_entry(WHOLE[0], [((0,), (5,))])}
    entries["step"] = said.BytesStorageMetadata()
    stored = {}
    for name, offset, file, data in [
        *(("model.w", at, FILES[i % 2], WHOLE[box(at, size)].clone()) for i, (at, size) in enumerate(BOXES)),
        ("model.b", (0,), FILES[1], WHOLE[0].clone()),
        ("step", None, FILES[0], 7),
    ]:
        archive = saved(data)
        stored[said.MetadataIndex(name, offset)] = _StorageInfo(file, len(content[file]), len(archive))
        content[file] += archive
    for file, data in content.items():
        (path / file).write_bytes(data)
    paths = {"model.w": ("model", "w"), "model.b": ("model", "b"), "step": ("step",)}
    metadata = said.Metadata(entries, paths, stored, said.StorageMeta(path))
    change(metadata, path)
    if not (path / METADATA).exists():
        (path / METADATA).write_bytes(pickle.dumps(metadata))
    return path


def tensor_entry(tensor: torch.Tensor, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Any:
    chunks = [said.ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
    return said.TensorStorageMetadata(said.TensorProperties(tensor.dtype), tensor.shape, chunks)


def box(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))


def whole(path: Path, prefix: str | None = None, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Return the tensors that the ranks publishing a folder offer together, assembled by the oracle."""
    shapes: dict[str, tuple[int, ...]] = {}
    shards = []
    for rank in range(ranks):
        part = part_of(read_checkpoint(path, prefix), rank, ranks)
        with Reader(part) as reader:
            tensors = {name: tensor.load().contiguous() for name, tensor in reader.read()}
        for m in described(part, rank):
            assert m.resolved_name is not None
            shapes[m.resolved_name] = m.global_shape or m.shape
            shards.append((rank, m, tensors[m.name].numpy()))
    return {name: torch.from_numpy(found) for name, found in oracle.gather(shapes, shards).items()}


# --- what is read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_chunks_are_read_where_they_lie_and_make_up_their_tensors(tmp_path: Path, ranks: int) -> None:
    folder = made(tmp_path / "c")
    found = whole(folder, ranks=ranks)
    assert found.keys() == {"w", "b"}
    assert torch.equal(found["w"], WHOLE) and torch.equal(found["b"], WHOLE[0])
    checkpoint = read_checkpoint(folder, None)
    assert (checkpoint.count, checkpoint.aside, checkpoint.nbytes) == (2, 1, 160)
    assert whole(folder, "model.", ranks).keys() == {"w", "b"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_saves_in_one_process_is_read_in_all_dtypes_and_strides(tmp_path: Path) -> None:
    model = {
        "t": torch.randn(5, 4).t(),
        "nhwc": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "slice": torch.arange(9)[2:5],
        "flags": torch.tensor([True, False]),
        **{
            name: torch.arange(4).to(getattr(torch, name))
            for name in ("bfloat16", "uint16", "float8_e4m3fn", "complex64", "float16")
        },
        "e8m0": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }
    optimizer = {"state": {"t": {"exp_avg": torch.zeros(5)}}, "param_groups": [{"lr": 0.1}]}
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "c", no_dist=True)
    checkpoint = read_checkpoint(tmp_path / "c", "model.")
    assert checkpoint.aside == 2
    with Reader(checkpoint) as reader:
        read = {name: tensor.load().contiguous() for name, tensor in reader.read()}
        for name, tensor in model.items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
            assert bytes_of(read[name]) == bytes_of(tensor), name
    assert read_checkpoint(tmp_path / "c", "optim.state.").count == 1
    for prefix, words in (
        (None, r"tensors of several dicts \(12 under 'model.', 1 under 'optim.'\); choose one by its prefix"),
        ("", "it holds no tensor at the top level"),
        ("modle.", "the name of no tensor begins with 'modle.'; its tensors: 12 under 'model.', 1 under 'optim.'"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read_checkpoint(tmp_path / "c", prefix)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_weights_beside_a_nested_optimizer_are_the_empty_prefix(tmp_path: Path) -> None:
    def flat(metadata: said.Metadata, path: Path) -> None:
        metadata.planner_data = {"model.w": ("model.w",), "model.b": ("optim", "b")}

    folder = made(tmp_path / "c", flat)
    assert whole(folder, "").keys() == {"model.w", "model.b"}  # a name that is not below its dict is at the top
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.planner_data = None
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    assert whole(folder).keys() == {"model.w", "model.b"}


def test_plans_that_megatron_keeps_in_the_metadata_are_passed_over(tmp_path: Path) -> None:
    def planned(metadata: said.Metadata, path: Path) -> None:
        chunk = said.ChunkStorageMetadata(torch.Size((0,)), torch.Size((5,)))
        data = planner.TensorWriteData(chunk, said.TensorProperties(torch.float32), torch.Size((5,)))
        item = planner.WriteItem(said.MetadataIndex("model.b"), planner.WriteItemType.TENSOR, tensor_data=data)
        metadata.all_local_plans = [planner.SavePlan([item])]  # type: ignore[attr-defined]

    assert whole(made(tmp_path / "c", planned)).keys() == {"w", "b"}


# --- what is refused --------------------------------------------------------------------------------------


B = said.MetadataIndex("model.b", (0,))


def chunks(metadata: said.Metadata) -> Any:
    return metadata.state_dict_metadata["model.w"].chunks


def exchange(metadata: said.Metadata) -> None:
    one, other = (key for key in metadata.storage_data if key.fqn == "model.w" and key.offset[0] == 4)
    data = metadata.storage_data
    data[one], data[other] = data[other], data[one]


def b_again(metadata: said.Metadata, name: str) -> None:
    """Describe model.b under another name below model."""
    metadata.state_dict_metadata[f"model.{name}"] = metadata.state_dict_metadata["model.b"]
    metadata.planner_data[f"model.{name}"] = ("model", name)
    metadata.storage_data[said.MetadataIndex(f"model.{name}", (0,))] = metadata.storage_data[B]


DAMAGES: dict[str, Change] = {
    f"{FILES[1]}: missing, and .metadata lists it": lambda m, path: (path / FILES[1]).unlink(),
    f"{FILES[1]}: 'model.b' at [0]: it ends at byte": lambda m, path: os.truncate(
        path / FILES[1], (path / FILES[1]).stat().st_size - 1
    ),
    "__2_0.distcp: nothing in .metadata lies in it": lambda m, path: shutil.copy(
        path / FILES[1], path / "__2_0.distcp"
    ),
    ".metadata: it cannot be read: it is a directory, expected a regular file": lambda m, path: (
        path / METADATA
    ).mkdir(),
    "model.safetensors of Hugging Face; move one of the two": lambda m, path: (path / "model.safetensors").touch(),
    "the file has [3, 3] float32, .metadata says [3, 2] float32; it is of another checkpoint": lambda m, path: exchange(
        m
    ),
    ".metadata says [5] int32": lambda m, path: setattr(
        m.state_dict_metadata["model.b"].properties, "dtype", torch.int32
    ),
    f"{FILES[1]}: 'model.b' at [0]: it is no archive of torch.save": lambda m, path: (path / FILES[1]).write_bytes(
        bytes((path / FILES[1]).stat().st_size)
    ),
    "'model.w': no chunk holds [4:7, 0:2]": lambda m, path: chunks(m).pop(1),
    "'model.w': chunks [4:7, 0:2] and [4:7, 1:4] overlap": lambda m, path: setattr(
        chunks(m)[2], "offsets", torch.Size((4, 1))
    ),
    "'model.w': chunks [0:4, 0:5] and [0:4, 0:5] overlap": lambda m, path: chunks(m).append(chunks(m)[0]),
    "'model.w': chunk [6:10, 0:5] lies outside the tensor [0:7, 0:5]": lambda m, path: setattr(
        chunks(m)[0], "offsets", torch.Size((6, 0))
    ),
    "'model.b': its chunk at [0] lies in no file": lambda m, path: m.storage_data.pop(B),
    "'model.b' at [0] and 'model.c' at [0] lie in the same bytes": lambda m, path: b_again(m, "c"),
    "'w at [0, 0]': several tensors or chunks are called so": lambda m, path: b_again(m, "w at [0, 0]"),
    "'model.b' (str): its file is '../__1_0.distcp'": lambda m, path: setattr(
        m.storage_data[B], "relative_path", f"../{FILES[1]}"
    ),
    "it was written through ['zstd']": lambda m, path: setattr(m.storage_data[B], "transform_descriptors", ["zstd"]),
    "its state_dict_metadata or storage_data is missing": lambda m, path: setattr(
        m, "storage_data", list(m.storage_data)
    ),
    ".metadata: these are no metadata of torch.distributed.checkpoint, or they are damaged": lambda m, path: (
        path / METADATA
    ).write_bytes(pickle.dumps(m)[:-9]),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_damaged_folder_is_refused_by_name(tmp_path: Path, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(made(tmp_path / "c", DAMAGES[words]), None)
    assert str(tmp_path) in str(caught.value) or words.startswith("'")
    assert words in str(caught.value)


def test_a_folder_without_metadata_was_not_finished(tmp_path: Path) -> None:
    folder = made(tmp_path / "c")
    (folder / METADATA).unlink()
    with pytest.raises(CheckpointError, match=r"it has no \.metadata, which torch.distributed.checkpoint writes last"):
        read_checkpoint(folder, None)


class Attack:
    """A pickle of it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_that_metadata_name_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    def attack(metadata: said.Metadata, path: Path) -> None:
        metadata.planner_data = Attack(marker)

    with pytest.raises(CheckpointError, match=r"it names posix.mkdir, which does not belong there"):
        read_checkpoint(made(tmp_path / "c", attack), None)
    assert not marker.exists()


def one_archive(archive: bytes) -> Change:
    """Replace model.b's archive with this one, at the end of its file."""

    def put(metadata: said.Metadata, path: Path) -> None:
        place = metadata.storage_data[said.MetadataIndex("model.b", (0,))]
        data = (path / FILES[1]).read_bytes()[: place.offset] + archive
        (path / FILES[1]).write_bytes(data)
        place.length = len(archive)

    return put


def rezipped(value: Any, compression: int = zipfile.ZIP_STORED, without: str = "", **changed: bytes) -> bytes:
    """Return a torch.save archive with entries changed or removed; name suffixes select the entries."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(value))) as old, zipfile.ZipFile(stream, "w", compression) as new:
        for name in old.namelist():
            end = name.rpartition("/")[2]
            if end != without:
                new.writestr(name, changed.get(end, old.read(name)))
    return stream.getvalue()


FIVE = torch.arange(5.0)


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (b"", "it is no archive of torch.save"),
        (b"PK\3\4" * 200, "it is no archive of torch.save"),
        (saved(FIVE, _use_new_zipfile_serialization=False), "it is no archive of torch.save"),
        (saved(Attack(Path("/nowhere"))), "it names posix.mkdir, which does not belong there"),
        (saved({"w": FIVE}), "it holds a dict, expected a tensor"),
        (saved(torch.nn.Parameter(FIVE)), "it names torch._utils._rebuild_parameter"),
        (saved(torch.zeros(10)[::2]), "leave gaps or overlap"),
        (saved(FIVE.expand(2, 5)), "leave gaps or overlap"),
        (saved(torch.arange(8.0)[:5]), "its storage has 32 bytes"),
        (rezipped(FIVE, zipfile.ZIP_DEFLATED), "compressed, or too large"),
        (rezipped(FIVE, without="0"), "its archive has no data/0"),
        (rezipped(FIVE, without="data.pkl"), "it has no data.pkl"),
        (rezipped(FIVE, **{"0": bytes(16)}), "its storage has 16 bytes"),
        (rezipped(FIVE, byteorder=b"big"), "not little endian"),
        (rezipped(FIVE, **{"data.pkl": b"\x80\x02K\x05."}), "it holds a int, expected a tensor"),
        (rezipped(FIVE, **{"data.pkl": b"\x80\x02]" * 9}), "data.pkl is refused"),
    ],
    ids=itertools.count(),  # archives differ from process to process, and pytest would name the cases by them
)
def test_an_archive_that_holds_anything_but_its_tensor_is_refused(tmp_path: Path, archive: bytes, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(made(tmp_path / "c", one_archive(archive)), None)
    assert f"{FILES[1]}: 'model.b' at [0]: " in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("size", [0, 2_000])
def test_a_file_that_changes_while_it_is_read_is_an_error_and_not_a_signal(tmp_path: Path, size: int) -> None:
    folder = made(tmp_path / "c")
    with Reader(read_checkpoint(folder, None)) as reader:
        reading = reader.read()
        next(reading)
        os.truncate(folder / FILES[1], size)
        with pytest.raises(CheckpointError, match=f"{FILES[1]}: it was changed while it was read"):
            list(reading)


# --- what is written --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_written_is_read_by_torch_and_by_refitd(tmp_path: Path) -> None:
    tensors = {"w": WHOLE, "half": WHOLE.bfloat16(), "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    writer, done = Dcp(), list[int]()
    names = writer.file_names(2)
    shards = [
        {name: (tuple(tensors[name].shape), str(tensors[name].dtype)[6:]) for name in held}
        for held in (("w", "scalar"), ("half", "empty"))
    ]
    with new_folder(tmp_path / "c", 0) as folder:
        for name, shard in zip(names, shards, strict=True):
            writer.write(folder / name, shard, tensors, done.append)
        writer.finish(folder, dict(zip(names, shards, strict=True)))
        assert not (tmp_path / "c").exists()
    assert sum(done) == sum(tensor.nbytes for tensor in tensors.values())
    loaded = {name: torch.full_like(tensor, 9) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    with Reader(read_checkpoint(tmp_path / "c", None)) as reader:
        assert all(torch.equal(tensor.load(), tensors[name]) for name, tensor in reader.read())


@pytest.mark.parametrize("raised", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_while_an_archive_is_written_is_raised_as_it_is(tmp_path: Path, raised: BaseException) -> None:
    def full(nbytes: int) -> None:
        raise raised

    with (
        pytest.raises(CheckpointError if isinstance(raised, OSError) else KeyboardInterrupt),
        new_folder(tmp_path / "c", 0) as folder,
    ):
        Dcp().write(folder / FILES[0], {"w": ((7, 5), "float32")}, {"w": WHOLE}, full)
    assert list(tmp_path.iterdir()) == []
