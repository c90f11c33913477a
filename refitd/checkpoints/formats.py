"""How saved tensors are written: as safetensors files with an index, or as torch.distributed.checkpoint does."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from io import RawIOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from refitd.checkpoints.folder import INDEX, METADATA, WHOLE
from refitd.checkpoints.header import header, is_writable, nbytes_of
from refitd.checkpoints.new_folder import CHUNK_BYTES, new_file, write_all, write_file

if TYPE_CHECKING:
    import torch

# {name: (shape, dtype name)} of one file's tensors, in the file's order
Shard = Mapping[str, tuple[tuple[int, ...], str]]
Progress = Callable[[int], object]


class Format(Protocol):
    """Writes the shards of one checkpoint into a folder, then what makes them one."""

    def can_hold(self, dtype: str) -> bool:
        """Return whether the format has this dtype."""

    def file_names(self, count: int) -> list[str]:
        """Return the names of `count` files of weights."""

    def write(self, path: Path, shard: Shard, tensors: Mapping[str, torch.Tensor], on_progress: Progress) -> None:
        """Write one file, new or again; `on_progress` gets the number of bytes of tensors in each write."""

    def finish(self, folder: Path, shards: Mapping[str, Shard]) -> None:
        """Write what tells which tensor is in which of these files."""


class Safetensors:
    """model.safetensors, or shards with model.safetensors.index.json."""

    def can_hold(self, dtype: str) -> bool:
        """Return whether safetensors has this dtype."""
        return is_writable(dtype)

    def file_names(self, count: int) -> list[str]:
        """Return Hugging Face's names for `count` files."""
        return [WHOLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]

    def write(self, path: Path, shard: Shard, tensors: Mapping[str, torch.Tensor], on_progress: Progress) -> None:
        """Write the header, and the tensors one after the other."""
        path.unlink(missing_ok=True)
        write_file(path, header(dict(shard)), (_bytes(tensors[name]) for name in shard), on_progress)

    def finish(self, folder: Path, shards: Mapping[str, Shard]) -> None:
        """Write the index, if there are several files."""
        if len(shards) == 1:
            return
        where = {name: file for file, shard in shards.items() for name in shard}
        total = sum(nbytes_of(*one) for shard in shards.values() for one in shard.values())
        said = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_file(folder / INDEX, (json.dumps(said, indent=2) + "\n").encode())


class Dcp:
    """__0_*.distcp, one archive of torch.save for each tensor, and .metadata: as one rank would save them."""

    def __init__(self) -> None:
        """Nothing is written yet."""
        self._places: dict[str, tuple[str, int, int]] = {}  # of each tensor: file, offset and length of its archive

    def can_hold(self, dtype: str) -> bool:
        """Return True: torch.save writes every dtype."""
        return True

    def file_names(self, count: int) -> list[str]:
        """Return the names of `count` files of one rank."""
        return [f"__0_{i}.distcp" for i in range(count)]

    def write(self, path: Path, shard: Shard, tensors: Mapping[str, torch.Tensor], on_progress: Progress) -> None:
        """Write the tensors' archives one after the other."""
        import torch

        path.unlink(missing_ok=True)
        with new_file(path) as file:
            for name in shard:
                stream = _Stream(file, tensors[name].nbytes, on_progress)
                offset = file.tell()
                torch.save(tensors[name], cast("IO[bytes]", stream))
                if stream.failed is not None:
                    raise stream.failed
                self._places[name] = path.name, offset, file.tell() - offset

    def finish(self, folder: Path, shards: Mapping[str, Shard]) -> None:
        """Write .metadata."""
        import torch
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

        entries: dict[str, Any] = {}
        stored: dict[Any, Any] = {}
        for name, (shape, dtype) in (item for shard in shards.values() for item in shard.items()):
            start, size = torch.Size([0] * len(shape)), torch.Size(shape)
            entries[name] = dcp.TensorStorageMetadata(
                properties=dcp.TensorProperties(dtype=getattr(torch, dtype)),
                size=size,
                chunks=[dcp.ChunkStorageMetadata(offsets=start, sizes=size)],
            )
            stored[dcp.MetadataIndex(name, start)] = _StorageInfo(*self._places[name])
        said = dcp.Metadata(
            state_dict_metadata=entries,
            planner_data={name: (name,) for name in entries},  # a state dict that is not nested
            storage_data=stored,
            storage_meta=dcp.StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        write_file(folder / METADATA, pickle.dumps(said))


FORMATS: Mapping[str, Callable[[], Format]] = {"safetensors": Safetensors, "dcp": Dcp}


class _Stream:
    """The file that torch.save writes to. Its writer is C++ and must not meet exceptions: errors are kept instead."""

    def __init__(self, file: RawIOBase, nbytes: int, on_progress: Progress) -> None:
        self._file, self._left, self._on_progress = file, nbytes, on_progress
        self.failed: BaseException | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), CHUNK_BYTES):
            chunk = view[at : at + CHUNK_BYTES]
            if self.failed is None:
                try:
                    self._write(chunk)
                except BaseException as exc:  # Ctrl-C, too
                    self.failed = exc
        return len(view)

    def _write(self, chunk: memoryview) -> None:
        size = min(len(chunk), self._left)  # what the archive has besides the tensor is not counted
        write_all(self._file, chunk)
        self._left -= size
        if size:
            self._on_progress(size)

    def flush(self) -> None:
        pass


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # a buffer, as numpy declares only from Python 3.12 on
