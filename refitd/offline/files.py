"""Read and write manifest files, and convert shards manifests, which list every rank with its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from refitd.describe.layout import canonical_name, is_sharded, layout_problems
from refitd.describe.metadata import ParameterMetadata, Repeat, Roster, Tile
from refitd.dtypes import dtype_name, element_size
from refitd.errors import ConfigError
from refitd.files import each, read_file, refusal, shown, table, tables
from refitd.offline.layouts import (
    KINDS,
    Layout,
    Manifest,
    ModelSpec,
    ShardRank,
    ShardRepeat,
    Shards,
    ShardSplit,
    ShardTensor,
    ShardTile,
    dtype_problems,
    problems_of,
    read_model,
)


def load(path: str | Path, model: ModelSpec | None = None) -> Manifest:
    """Read a layout or shards manifest.

    Args:
        path: a TOML or JSON file. A model file that it names is relative to its folder.
        model: overrides the model that a layout names.

    Raises:
        ConfigError: lists everything that is wrong with the manifest.
    """
    path = Path(path)
    values = read_file(path)
    inner = values.get("model")
    if values.get("kind") == "layout" and model is None and isinstance(inner, str):
        model = load_model(path.parent / inner)
    found = read(values, str(path), model)
    if isinstance(found, ModelSpec):
        raise ConfigError(f"{path}: is a model, expected a layout or shards; a layout names its model, or --model does")
    return found


def load_model(path: str | Path) -> ModelSpec:
    """Read a model manifest; raises ConfigError as `load` does."""
    values = read_file(Path(path))
    if (kind := values.get("kind")) != "model":
        raise ConfigError(f"{path}: kind is {shown(kind)}, expected a model")
    found = read(values, str(path))
    assert isinstance(found, ModelSpec)
    return found


def read(values: Mapping[str, Any], where: str, model: ModelSpec | None = None) -> ModelSpec | Manifest:
    """Turn the tables of a file into a checked manifest; a layout's model must be in the file, or be passed.

    Raises:
        ConfigError: lists everything that is wrong with the manifest.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where}: kind is {shown(kind)}, expected one of {', '.join(KINDS)}")
    problems: list[str] = []
    rest = {key: value for key, value in values.items() if key != "kind"}
    if kind == "layout":
        if model is not None:
            rest["model"] = model
        elif isinstance(inner := rest.get("model"), Mapping):
            inner = {key: value for key, value in inner.items() if key != "kind"}
            rest["model"] = read_model(inner, "model", problems)
        elif "model" not in rest:
            problems.append('model: missing; name a model file (model = "FILE"), write a [model], or pass --model')
    found: ModelSpec | Manifest | None
    if kind == "model":
        found = read_model(rest, "", problems)
    elif kind == "layout":
        found = table(Layout, rest, "", problems)
        if found is not None and found.model is not None and not problems:
            problems += problems_of(found)
    else:
        found = read_shards(rest, problems)
    if problems or found is None:
        raise refusal(where, problems)
    return found


def to_json(manifest: ModelSpec | Manifest) -> str:
    """Return a manifest as a JSON file that `read` reads back."""
    packed = msgspec.to_builtins(manifest)
    return msgspec.json.format(msgspec.json.encode(packed), indent=1).decode() + "\n"


def read_shards(values: Mapping[str, Any], problems: list[str]) -> Shards | None:
    """Read and check the tables of a shards manifest; None if they cannot be read."""
    shards: dict[str, tuple[ShardTensor, ...]] = {}
    given = values.get("shards")
    if given is not None and not isinstance(given, Mapping):
        problems.append(f"shards: is {shown(given)}, expected tables of lists of tensors")
    for key, entries in given.items() if isinstance(given, Mapping) else ():
        where = f"shards.{key}"
        read = each(ShardTensor, tables(entries, where, problems), where, problems)
        shards[key] = tuple(tensor for tensor in read if tensor is not None)
    ranks = each(ShardRank, tables(values.get("ranks"), "ranks", problems), "ranks", problems)
    read_already: dict[str, Any] = {}
    if "shards" in values:
        read_already["shards"] = shards
    if "ranks" in values:
        read_already["ranks"] = tuple(rank for rank in ranks if rank is not None)
    found = table(Shards, values, "", problems, **read_already)
    if found is not None and not problems:
        problems += _shards_problems(found)
    return found


def _shards_problems(manifest: Shards) -> list[str]:
    problems: list[str] = []
    for key, tensors in manifest.shards.items():
        names: set[str] = set()
        for tensor in tensors:
            where = f"shards.{key}: {tensor.name}"
            if tensor.name in names:
                problems.append(f"{where}: described twice in one shard; local names must be unique")
            names.add(tensor.name)
            problems += dtype_problems(f"{where}: dtype", tensor.dtype)
            if tensor.split is not None and tensor.tiles is not None:
                problems.append(f"{where}: split and tiles are both given; give one of them")
    known: dict[int, int] = {}
    for number, rank in enumerate(manifest.ranks):
        if rank.rank in known:
            problems.append(f"ranks[{number}]: rank {rank.rank} is also that of ranks[{known[rank.rank]}]")
        known.setdefault(rank.rank, number)
    if not manifest.ranks:
        problems.append("ranks: none; a manifest has at least one")
    if problems:
        return problems
    for number, rank in enumerate(manifest.ranks):
        found = _rank_problems(manifest, rank, known)
        problems += [f"ranks[{number}] (rank {rank.rank}): {problem}" for problem in found]
    return problems


def _rank_problems(manifest: Shards, rank: ShardRank, known: Mapping[int, int]) -> list[str]:
    problems = []
    if rank.shard not in manifest.shards:
        known_shards = ", ".join(list(manifest.shards)[:8]) or "none"
        return [f"shard {rank.shard!r} is not among the shards; known: {known_shards}"]
    for name, group in rank.groups.items():
        if rank.rank not in group:
            problems.append(f"it is not in its group {name!r} {shown(list(group))}")
        if len(set(group)) != len(group):
            problems.append(f"its group {name!r} {shown(list(group))} names a rank twice")
        if strangers := [other for other in group if other not in known]:
            problems.append(f"its group {name!r} names ranks that the manifest lacks: {shown(strangers)}")
    tensors = manifest.shards[rank.shard]
    missing = sorted({t.split.group for t in tensors if t.split is not None} - rank.groups.keys())
    problems += [f"shard {rank.shard!r} splits tensors over group {name!r}, which it lacks" for name in missing]
    return problems or list(
        dict.fromkeys(problem for t in tensors for problem in layout_problems(shard_metadata(t, rank)))
    )


def shard_metadata(tensor: ShardTensor, rank: ShardRank, offset: int = 0) -> ParameterMetadata:
    """Return the description of a tensor on `rank`, with `offset` added to every rank."""
    split = tensor.split
    tiles = None if tensor.tiles is None else tuple(
        Tile(
            t.tensor, t.offset, t.size, t.local_offset, t.local_stride,
            None if t.repeat is None else Repeat(t.repeat.dim, t.repeat.count, t.repeat.step, t.repeat.local_step),
        )
        for t in tensor.tiles
    )  # fmt: skip
    return ParameterMetadata(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        element_size=element_size(tensor.dtype),
        is_tp=split is not None,
        partition_dim=split.dim if split else 0,
        partition_stride=split.stride if split else 1,
        partition_sizes=list(split.sizes) if split and split.sizes is not None else None,
        owner_rank=rank.rank + offset,
        tensor_parallel_group_ranks=[offset + other for other in rank.groups[split.group]] if split else None,
        resolved_name=tensor.tensor or tensor.name,
        tiles=tiles,
        global_shape=tensor.global_shape,
        fill=tensor.fill,
        aliases=tensor.aliases,
        cast_from=tensor.cast_from,
        cast_to=tensor.cast_to,
    )


def shards_of(name: str, rosters: Iterable[Roster], side: Literal["source", "destination"]) -> Shards:
    """Return the manifest of one side of rosters; ranks that differ only in their groups share a shard.

    It keeps the rosters' rank numbers (first_rank 0).
    """
    numbers: dict[tuple[ShardTensor, ...], str] = {}
    known: dict[int, tuple[object, str, dict[str, tuple[int, ...]]]] = {}
    ranks = []
    for roster in sorted(rosters, key=lambda roster: roster.rank):
        held = getattr(roster, side)
        if not held:
            continue
        if id(held) in known:
            _, shard, groups = known[id(held)]
        else:
            tensors, groups = _shard(held)
            shard = numbers.setdefault(tensors, f"shard{len(numbers)}")
            known[id(held)] = (held, shard, groups)  # keeping `held` prevents the reuse of its id
        ranks.append(ShardRank(rank=roster.rank, shard=shard, node=roster.node, label=roster.label, groups=groups))
    shards = {shard: tensors for tensors, shard in numbers.items()}
    return Shards(name=name, shards=shards, ranks=tuple(ranks), first_rank=0)


def _shard(held: Iterable[ParameterMetadata]) -> tuple[tuple[ShardTensor, ...], dict[str, tuple[int, ...]]]:
    """Return a rank's tensors with named groups, and the groups by name, in the order of first use."""
    groups: dict[tuple[int, ...], str] = {}
    tensors = []
    for meta in held:
        split = None
        if is_sharded(meta):
            group = tuple(meta.tensor_parallel_group_ranks or ())
            sizes = None if meta.partition_sizes is None else tuple(meta.partition_sizes)
            split = ShardSplit(
                dim=meta.partition_dim,
                group=groups.setdefault(group, f"group{len(groups)}"),
                stride=meta.partition_stride,
                sizes=sizes,
            )
        canonical = canonical_name(meta)
        tensors.append(
            ShardTensor(
                name=meta.name,
                shape=tuple(meta.shape),
                dtype=dtype_name(meta.dtype),
                tensor=None if canonical == meta.name else canonical,
                split=split,
                tiles=None if meta.tiles is None else tuple(map(_shard_tile, meta.tiles)),
                global_shape=None if meta.global_shape is None else tuple(meta.global_shape),
                fill=meta.fill,
                aliases=tuple(meta.aliases),
                cast_from=meta.cast_from,
                cast_to=meta.cast_to,
            )
        )
    return tuple(tensors), {name: group for group, name in groups.items()}


def _shard_tile(tile: Tile) -> ShardTile:
    r = tile.repeat
    repeat = None if r is None else ShardRepeat(r.dim, r.count, r.step, r.local_step)
    return ShardTile(tile.tensor, tile.offset, tile.size, tile.local_offset, tile.local_stride, repeat)
