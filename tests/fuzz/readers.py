"""Every reader of foreign input that needs no process: each takes one input, and only accepts or refuses it."""

from __future__ import annotations

import json
import random
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import xxhash

from refitd import ParameterMetadata
from refitd.addressing.copies import ConversionList, CopyList, address
from refitd.addressing.paths import TransferList, node_transfers, transfers_of
from refitd.addressing.places import LocalTensor
from refitd.checkpoints import safetensors as names
from refitd.checkpoints.publish import read_checkpoint
from refitd.checkpoints.safetensors import header
from refitd.config import load
from refitd.coordinator.descriptions import Lists, Registered, ShardReader, unpack_shard
from refitd.coordinator.plans import make_plan
from refitd.errors import CheckpointError, ConfigError, ProtocolError, RefitdError, RefusedError
from refitd.files import parse
from refitd.offline import files
from refitd.plan.build import plan_copies
from refitd.plan.table import CopyTable, CrossingTable, FillTable
from refitd.protocol import cluster, keys, local, sidecar
from refitd.protocol.base import Decoder, digest_of, encode
from refitd.protocol.shards import Shard, WireTensor, shard_of
from tests.fuzz.values import damaged, damaged_text, spoilt, value_of
from tests.support.layouts import crossing
from tests.support.places import by_rank

ROOT = Path(__file__).parents[2]

UNIONS: dict[str, Any] = {
    "client to daemon": local.ClientRequest,
    "daemon to client": local.ClientReply,
    "daemon to coordinator": cluster.NodeMessage,
    "coordinator to daemon": cluster.CoordinatorMessage,
    "worker to daemon": sidecar.FromWorker,
    "daemon to worker": sidecar.ToWorker,
    "descriptor socket": sidecar.DescriptorRequest,
    "descriptor socket, back": sidecar.DescriptorReply,
}


@dataclass
class Reader:
    """`feed(rng)` makes one input and returns whether it was accepted; an exception of another kind is a finding."""

    name: str
    feed: Callable[[random.Random], bool]
    share: float = 1.0
    counts: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})


NAMES = (
    *(f"codec: {name}" for name in UNIONS),
    "codec: packed shards",
    "planning of hostile shards",
    "plan tables on the wire",
    "copy lists, transfers, conversions",
    "manifests",
    "lists of allowed keys",
    "key files",
    "configuration",
    "safetensors folders",
    "torch.distributed.checkpoint folders",
)


def readers(directory: Path) -> list[Reader]:
    """Return all readers; those of files on disk write them into `directory`."""
    feeds = [
        *((_codec(union), 2.0) for union in UNIONS.values()),
        (_packed, 1.0),
        (_planned, 0.4),
        (_tables, 1.0),
        (_blocks, 1.0),
        (_manifests(), 1.5),
        (_key_lists(directory), 1.0),
        (_key_files(directory), 1.0),
        (_configs(directory), 0.6),
        (_checkpoints(_safetensors(directory)), 0.6),
        (_checkpoints(_dcp(directory)), 0.6),
    ]
    return [Reader(name, feed, share) for name, (feed, share) in zip(NAMES, feeds, strict=True)]


def frame_of(kinds: list[Any], rng: random.Random, names: tuple[str, ...] = ("policy",)) -> bytes:
    """Return the frame of a message: a valid one, a nearly valid one, or one with corrupted bytes."""
    value = value_of(rng.choice(kinds), rng, names)
    how = rng.random()
    if how < 0.4:
        value = spoilt(value, rng)
    number = rng.choice((0, 1, 7, 1 << 61)) if how < 0.95 else rng.choice((-1, 1 << 62, "1", None, True, 1.5))
    try:
        frame: bytes = msgpack.packb([number, value])
    except (OverflowError, ValueError):
        return rng.randbytes(30)
    return damaged(frame, rng) if 0.4 <= how < 0.7 else frame


def kinds_of(union: Any) -> list[Any]:
    """Return msgspec's description of the messages of a union."""
    info = msgspec.inspect.type_info(union)
    return list(info.types) if isinstance(info, msgspec.inspect.UnionType) else [info]


def _codec(union: Any) -> Callable[[random.Random], bool]:
    kinds, decoder = kinds_of(union), Decoder(union)

    def feed(rng: random.Random) -> bool:
        try:
            number, message = decoder.decode(frame_of(kinds, rng))
        except ProtocolError:
            return False
        # an accepted message must survive encoding and decoding (compared as text, because NaN differs from itself)
        again = encode(number, message)
        assert repr(decoder.decode(again)) == repr((number, message)), message
        return True

    return feed


SHARD = shard_of([ParameterMetadata("w", (4, 8), "bfloat16", 2), ParameterMetadata("v", (3,), "float32", 4)])
_SHARD_KIND = msgspec.inspect.type_info(Shard)


def _packed(rng: random.Random) -> bool:
    raw = msgpack.packb(spoilt(value_of(_SHARD_KIND, rng), rng) if rng.random() < 0.5 else value_of(_SHARD_KIND, rng))
    digest = xxhash.xxh3_128_hexdigest(raw)
    data = zlib.compress(raw, 1)
    if rng.random() < 0.3:
        data = damaged(data, rng)
    try:
        unpack_shard(data, digest, Lists())
    except (ProtocolError, RefusedError):
        return False
    return True


def _planned(rng: random.Random) -> bool:
    """A shard that passes the codec reaches the planner, which may refuse it but must not crash."""
    tensor = msgspec.to_builtins(WireTensor("w", (4, 8), "bfloat16"))
    kind = msgspec.inspect.type_info(WireTensor)
    wild = value_of(kind, rng)
    for name in rng.sample(sorted(wild), rng.randrange(1, 4)):
        if name != "name":
            tensor[name] = wild[name]
    groups = [[0, 1], [-1, 0], [0]]
    try:
        shard = msgspec.convert({"tensors": [tensor], "groups": groups}, Shard, strict=True)
    except msgspec.ValidationError:
        return False
    pools = [
        [Registered(0, "source rank 0", "n0", True, digest_of(shard), shard)],
        [Registered(1, "a rank 0", "n0", False, digest_of(SHARD), SHARD if rng.random() < 0.5 else shard)],
    ]
    try:
        make_plan(ShardReader().rosters(pools))
    except RefitdError:
        return False
    return True


def _a_table() -> CopyTable:
    both = [Registered(rank, str(rank), "n0", rank == 0, digest_of(SHARD), SHARD) for rank in (0, 1)]
    return plan_copies(ShardReader().rosters([both[:1], both[1:]])).table


def _tables(rng: random.Random) -> bool:
    wire: dict[str, Any] = _WIRE if rng.random() < 0.8 else {"rows": 0, "dims": 1}
    for _ in range(rng.randrange(3)):
        wire = dict(wire) or {"rows": 0}
        key = rng.choice(list(wire))
        if isinstance(wire[key], bytes) and rng.random() < 0.7:
            wire[key] = damaged(wire[key], rng)
        else:
            wire = spoilt(wire, rng)
            if not isinstance(wire, dict):
                return False
    try:
        rng.choice((CopyTable, CopyTable, CrossingTable, FillTable)).from_wire(wire)
    except ValueError:
        return False
    return True


_WIRE = _a_table().to_wire()


def _a_block() -> tuple[bytes, bytes, bytes]:
    table = _a_table()
    places = by_rank({(r, t.name): LocalTensor(r, 0, t.shape, _strides(t)) for r in (0, 1) for t in SHARD.tensors})
    transfers = transfers_of(node_transfers(crossing(table), {0: 0, 1: 1}, 1), 0, 0, places, places)
    one = {f.name: np.ones((2, 2) if f.name == "size" else 2, np.int64) for f in fields(ConversionList)}
    return address(table, places, places).to_bytes(), transfers.to_bytes(), ConversionList(**one).to_bytes()


def _strides(tensor: WireTensor) -> tuple[int, ...]:
    size, found = 2 if tensor.dtype == "bfloat16" else 4, []
    for length in reversed(tensor.shape):
        found.append(size)
        size *= length
    return tuple(reversed(found))


_BLOCKS: list[tuple[Any, bytes]] = []


def _blocks(rng: random.Random) -> bool:
    if not _BLOCKS:
        _BLOCKS.extend(zip((CopyList, TransferList, ConversionList), _a_block(), strict=True))
    kind, block = rng.choice(_BLOCKS)
    try:
        kind.from_bytes(damaged(block, rng) if rng.random() < 0.9 else block)
    except ValueError:
        return False
    return True


def _manifests() -> Callable[[random.Random], bool]:
    layouts = ROOT / "configs" / "layouts"
    texts = [(path.read_text(), False) for path in sorted(layouts.rglob("*.toml"))]
    texts += [(files.to_json(files.load_model(path)), True) for path in sorted((layouts / "models").glob("*.toml"))[:2]]
    model = files.load_model(layouts / "models" / "llama-3-70b-hf.toml")

    def feed(rng: random.Random) -> bool:
        text, is_json = rng.choice(texts)
        text = damaged_text(text, rng)
        try:
            values = parse(text, "here", is_json=is_json)
            if rng.random() < 0.3:
                values = spoilt(values, rng)
            if not isinstance(values, dict):
                return False
            files.read(values, "here", model if rng.random() < 0.8 else None)
        except ConfigError:
            return False
        return True

    return feed


def _written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    path.chmod(0o600)
    return path


def _key_lists(directory: Path) -> Callable[[random.Random], bool]:
    pairs = [keys.generate(name) for name in ("n0", "n1")]
    text = f"# all\n{pairs[0].public_line} node=n0 roles=engine,trainer\n\n{pairs[1].public_line}\n"

    def feed(rng: random.Random) -> bool:
        path = _written(directory / "allowed.pub", damaged_text(text, rng))
        try:
            keys.read_list(path)
            keys.read_public(str(path))
        except ConfigError:
            return False
        return True

    return feed


def _key_files(directory: Path) -> Callable[[random.Random], bool]:
    secret, _ = keys.write(keys.generate("n0"), directory)
    text = secret.read_text()

    def feed(rng: random.Random) -> bool:
        path = _written(directory / "damaged.key", damaged_text(text, rng))
        try:
            keys.read(path)
        except ConfigError as exc:
            assert text.rpartition('secret = "')[2].strip().strip('"') not in str(exc), "a secret in an error"
            return False
        return True

    return feed


def _configs(directory: Path) -> Callable[[random.Random], bool]:
    text = (ROOT / "configs" / "laptop.toml").read_text()
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))

    def feed(rng: random.Random) -> bool:
        path = _written(directory / "refitd.toml", damaged_text(text, rng))
        environ = {}
        if rng.random() < 0.3:
            key = rng.choice(("NODE__WORKERS", "NODE__ROLES", "LOG__LEVEL", "MODELS__A", "X__Y", "NODE__"))
            environ[f"REFITD_{key}"] = damaged_text("{ a = 4 }", rng)
        try:
            found = load(path, environ)
            assert found.coordinator_endpoint
        except ConfigError:
            return False
        return True

    return feed


def _safetensors(directory: Path) -> Path:
    path = directory / "safetensors"
    path.mkdir()
    index = {}
    for i, name in enumerate("ab"):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        (path / file).write_bytes(header({name: ((3,), "float32"), "c" * (i + 2): ((2, 2), "uint8")}) + bytes(16))
        index |= dict.fromkeys((name, "c" * (i + 2)), file)
    (path / names.INDEX).write_text(json.dumps({"weight_map": index}))
    return path


def _dcp(directory: Path) -> Path:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.arange(12.0).view(3, 4), "b": torch.arange(3).bfloat16(), "t": torch.arange(6).view(2, 3).t()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process is intended
        dcp.save({"model": state}, checkpoint_id=directory / "dcp", no_dist=True)
    return directory / "dcp"


def _checkpoints(folder: Path) -> Callable[[random.Random], bool]:
    """A folder with one damaged file; an accepted folder is read to its end."""
    from refitd.checkpoints.publish import Reader

    whole = {path.name: path.read_bytes() for path in folder.iterdir()}

    def feed(rng: random.Random) -> bool:
        name = rng.choice(sorted(whole))
        (folder / name).write_bytes(damaged(whole[name], rng))
        try:
            with Reader(read_checkpoint(folder, None)) as reader:
                assert all(tensor.load().nbytes < 1 << 20 for _, tensor in reader.read())
        except CheckpointError as exc:
            assert len(str(exc)) < 20_000
            return False
        finally:
            (folder / name).write_bytes(whole[name])
        return True

    return feed
