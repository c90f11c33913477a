"""Describe tensors by the canonical names of another framework: a map from name patterns to names and fused parts.

    "decoder.layers.{layer}.mlp.linear_fc2.weight": "model.layers.{layer}.mlp.down_proj.weight"
    "decoder.layers.{layer}.mlp.linear_fc1.weight": Fused((Part(gate, 11008), Part(up, 11008)))
    "embedding.word_embeddings.weight":             Padded("model.embed_tokens.weight", 32003)
    "model.layers.{layer}.mlp.gate_proj.weight":    Part("model.layers.{layer}.mlp.gate_up.weight", 11008)
    "model.layers.{layer}.mlp.up_proj.weight":      Part("model.layers.{layer}.mlp.gate_up.weight", 11008, first=11008)

Patterns are matched against the names that a description has already: layers and experts are numbered over the whole
model. A tensor's tiles (of TP, FSDP, several experts in one tensor) are intersected with the parts:

    2 groups of q0 q1 k0 v0 | q2 q3 k1 v1 over TP2: rank 1 holds rows 2:4 of q, row 1 of k and row 1 of v
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from refitd.describe.layout import canonical_name, global_shape_of, is_sharded, tiles_of
from refitd.describe.metadata import ParameterMetadata, Repeat, Tile, spaced
from refitd.describe.names import detect_expert_index, with_expert_index
from refitd.errors import PlanError
from refitd.text import nearest, shown


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a fused tensor, and their place in a canonical tensor.

    Alone, as the value of a pattern, it says that the tensor is some rows of the canonical one:
    `{"gate": Part("gate_up", 512), "up": Part("gate_up", 512, first=512)}`.

    Attributes:
        tensor: the canonical name; it may use the placeholders of the pattern.
        rows: the number of rows in the whole fused tensor, over all ranks.
        first: the row of the canonical tensor that the first of them is.
        step: the distance between two of them in the canonical tensor (2: every other row).
        stack: if not 0, the canonical tensor has one more dimension in front, of this size, indexed by {expert}.
        is_transposed: whether rows of the fused tensor are columns of the canonical one.
        whole: the number of rows of the whole canonical tensor. 0: up to the last row that this map names for it, in
            parts of this rule and in parts of other rules that are other rows.
    """

    tensor: str
    rows: int
    first: int = 0
    step: int = 1
    stack: int = 0
    is_transposed: bool = False
    whole: int = 0

    @property
    def end(self) -> int:
        """The row of the canonical tensor after the last one of this part."""
        return self.first + (self.rows - 1) * self.step + 1


@dataclass(frozen=True, slots=True)
class Fused:
    """A tensor that holds the rows of several parts.

    Attributes:
        parts: the parts, in order.
        groups: the number of equal groups along the rows, each with its share of every part in turn; ranks split the
            rows contiguously (Megatron's linear_qkv: one per query group). None: the parts follow each other, and each
            rank that splits the rows has its share of every part (linear_fc1: gate | up on each rank).
    """

    parts: tuple[Part, ...]
    groups: int | None = None


@dataclass(frozen=True, slots=True)
class Padded:
    """A tensor with more rows than the canonical one. Sources do not offer the padding; targets write `fill` there."""

    tensor: str
    rows: int
    fill: float = 0.0


Rule = str | Part | Fused | Padded
Names = Mapping[str, Rule]

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_EVERY = "{rest}"  # the pattern that matches every name


def rename(metas: Sequence[ParameterMetadata], names: Names, *, is_target: bool) -> list[ParameterMetadata]:
    """Return the descriptions under the canonical names that `names` gives them.

    Args:
        metas: descriptions with canonical names of one framework.
        names: {pattern: canonical name, Part, Fused or Padded}. `{layer}`, `{expert}` and other placeholders match
            digits, `{rest}` any text. The first pattern that matches counts.
        is_target: whether the tensors are written; padding then needs a fill.

    Raises:
        PlanError: lists every tensor that no pattern matches, with the nearest names, and every tensor that contradicts
            its rule. Two tensors of a source must not provide equal rows: one would be sent and the other lost.
    """
    rules = _Rules(names)
    found: list[ParameterMetadata] = []
    problems: list[str] = []
    given = _Given()
    for meta in metas:
        try:
            found.append(_renamed(meta, rules, is_target))
            if not is_target:
                given.check(meta, rules)
        except PlanError as error:
            problems += error.violations
    if problems:
        raise PlanError(problems)
    return found


class _Rules:
    """The map, with patterns compiled."""

    def __init__(self, names: Names) -> None:
        if not isinstance(names, Mapping):
            raise PlanError(f"names is {shown(names)}, expected {{pattern: canonical name, Part, Fused or Padded}}")
        self._rules: list[tuple[re.Pattern[str], str | Fused | Padded]] = []
        self._patterns = list(names)
        self._parts: dict[str, list[tuple[Fused, Part]]] = {}  # by canonical name, with the rules that they are of
        problems: list[str] = []
        if _EVERY in self._patterns[:-1]:
            after = self._patterns[self._patterns.index(_EVERY) + 1]
            problems.append(f"names[{after!r}] comes after {_EVERY!r}, which matches every name; put {_EVERY!r} last")
        for pattern, rule in names.items():
            if problem := _rule_problem(pattern, rule):
                problems.append(f"names[{pattern!r}] {problem}" if isinstance(pattern, str) else f"names {problem}")
                continue
            split = _PLACEHOLDER.split(pattern)
            text = "".join(
                re.escape(piece) if i % 2 == 0 else f"(?P<{piece}>{'.+' if piece == 'rest' else '[0-9]+'})"
                for i, piece in enumerate(split)
            )
            kept = Fused((rule,)) if isinstance(rule, Part) else rule
            self._rules.append((re.compile(text), kept))
            if isinstance(kept, Fused):
                for part in kept.parts:
                    self._parts.setdefault(part.tensor, []).append((kept, part))
        if problems:
            raise PlanError(problems)

    def rows_of(self, part: Part, rule: Fused) -> int:
        """Return the number of rows of the whole canonical tensor of a rule's part.

        Other rules count if their parts are other rows: {"gate": rows 0:4 of w, "up": rows 4:8 of w} gives 8 for both.
        Parts with rows in common are of alternatives: a map may cover models, or layers, of several sizes.
        """
        if part.whole:
            return part.whole
        found = [p.whole or p.end for p in rule.parts if p.tensor == part.tensor]
        others = [p for r, p in self._parts.get(part.tensor, ()) if r is not rule and not _meet(p, part)]
        return max(found + [p.whole or p.end for p in others])

    def find(self, name: str, subject: str) -> tuple[str | Fused | Padded, dict[str, str]]:
        """Return the rule for a name, and the values of its placeholders; `subject` is for the error."""
        index = detect_expert_index(name)
        for spelled in (name, *(() if index is None else (with_expert_index(name, index),))):
            for pattern, rule in self._rules:
                if match := pattern.fullmatch(spelled):
                    return rule, match.groupdict()
        numbers = re.findall(r"\d+", name)
        layer = numbers[0] if numbers else "0"
        close = nearest(name, [p.replace("{layer}", layer) for p in self._patterns], 5)
        raise PlanError(
            f"{subject}: no rule of names matches {name}; nearest: {', '.join(close) or 'none'}; check the model's "
            f"architecture, or add a rule ({{**names, {name!r}: ...}})"
        )


def _rule_problem(pattern: object, rule: object) -> str:
    if not isinstance(pattern, str) or not pattern:
        return f"has the key {shown(pattern)}, expected a pattern of names"
    known = _PLACEHOLDER.findall(pattern)
    if len(set(known)) != len(known):
        return "has a placeholder twice"
    targets: list[str] = []
    if isinstance(rule, str):
        targets = [rule]
    elif isinstance(rule, Padded):
        targets = [rule.tensor]
        if rule.rows < 1:
            return f"is {rule}, expected 1 row or more"
    elif isinstance(rule, Part | Fused):
        rule = Fused((rule,)) if isinstance(rule, Part) else rule
        targets = [part.tensor for part in rule.parts]
        groups = 1 if rule.groups is None else rule.groups
        if not rule.parts or groups < 1 or any(p.rows < 1 or p.rows % groups for p in rule.parts):
            return f"is {rule}, expected parts with rows that the groups divide"
        if any(p.first < 0 or p.step < 1 or p.stack < 0 for p in rule.parts):
            return f"is {rule}, expected first and stack of 0 or more, step of 1 or more"
        if short := next((p for p in rule.parts if p.whole and p.whole < p.end), None):
            return f"says that {short.tensor} has {short.whole} rows (whole), and names rows of it up to {short.end}"
        if any(p.stack for p in rule.parts) and "expert" not in known:
            return "stacks experts, and the pattern has no {expert}"
        if twice := _taken_twice(rule.parts):
            return f"takes rows of {twice} twice"
    else:
        return f"is {shown(rule)}, expected a canonical name, Part, Fused or Padded"
    if unknown := sorted({mark for target in targets for mark in _PLACEHOLDER.findall(target)} - set(known)):
        return f"has no {{{unknown[0]}}}, and its canonical name has"
    return ""


def _taken_twice(parts: Sequence[Part]) -> str:
    """Return a canonical tensor with rows that two parts take; "" if no rows are taken twice."""
    for one, other in itertools.combinations(parts, 2):
        if one.tensor == other.tensor and _meet(one, other):
            return one.tensor
    return ""


def _meet(one: Part | None, other: Part | None) -> bool:
    """Whether two parts of one canonical tensor, None for all of it, have elements in common."""
    if one is None or other is None or one.is_transposed != other.is_transposed:
        return True
    if one.end <= other.first or other.end <= one.first:
        return False
    rows, others = (range(p.first, p.end, p.step) for p in (one, other))
    return not set(rows).isdisjoint(others)


class _Given:
    """Which of a source's tensors gives which rows of the canonical ones."""

    def __init__(self) -> None:
        # by canonical tensor, and expert if it stacks them: the parts that were given, None for all of it, and by whom
        self._of: dict[tuple[str, str], list[tuple[Part | None, str]]] = {}

    def check(self, meta: ParameterMetadata, rules: _Rules) -> None:
        """Note what a description gives; raises PlanError if another tensor gives some of it already."""
        for name in _by_tensor(meta):
            rule, marks = rules.find(name, meta.name)
            for tensor, part in _parts_of(rule):
                new = _filled(tensor, marks)
                there = self._of.setdefault((new, marks["expert"] if part and part.stack else ""), [])
                for other, old in there:
                    if old != name and _meet(part, other):
                        rows = "" if part is None and other is None else "rows of "
                        raise PlanError(
                            f"{meta.name}: names give {rows}{new} to {old} and to {name}; give each its own, or if "
                            f"each is some of its rows, say which: {old!r}: Part({new!r}, rows=N), "
                            f"{name!r}: Part({new!r}, rows=M, first=N)"
                        )
                if (part, name) not in there:
                    there.append((part, name))


def _parts_of(rule: str | Fused | Padded) -> Iterator[tuple[str, Part | None]]:
    """Yield the canonical tensors that a rule names, with the part of each; None: all of it."""
    if isinstance(rule, Fused):
        for part in rule.parts:
            yield part.tensor, part
    else:
        yield rule if isinstance(rule, str) else rule.tensor, None


def _renamed(meta: ParameterMetadata, rules: _Rules, is_target: bool) -> ParameterMetadata:
    aliases = tuple(_single_name(alias, rules, meta.name) for alias in meta.aliases)
    if meta.tiles is None:
        rule, marks = rules.find(canonical_name(meta), meta.name)
        if isinstance(rule, str):
            # without tiles: other ranks' descriptions of the split can still complete it
            return replace(meta, resolved_name=_filled(rule, marks), aliases=aliases)
        if isinstance(rule, Fused):
            meta = _with_shares(meta, rule)
    shape, fill = global_shape_of(meta), meta.fill
    tiles: list[Tile] = []
    shapes: dict[str, tuple[int, ...] | None] = {}  # of the canonical tensors; None: not known
    for name, held in _by_tensor(meta).items():
        rule, marks = rules.find(name, meta.name)
        if isinstance(rule, str):
            shapes[_filled(rule, marks)] = shape
            tiles += [replace(tile, tensor=_filled(rule, marks)) for tile in held]
            continue
        if problem := _shape_problem(rule, name, held, shape) or _stack_problem(rule, marks):
            raise PlanError(f"{meta.name}: {problem}; check the config behind names=, and the tensor's split")
        if isinstance(rule, Padded):
            fill = rule.fill if is_target and fill is None else fill
            rule = Fused((Part(rule.tensor, rule.rows, whole=rule.rows),))
        for part in rule.parts:
            shapes[_filled(part.tensor, marks)] = (
                None if shape is None else _canonical_shape(part, rules.rows_of(part, rule), shape[1:])
            )
        tiles += [found for tile in held for found in _composed(tile, rule, marks)]
    only = next(iter(shapes)) if len(shapes) == 1 else None
    return replace(
        meta,
        resolved_name=only or canonical_name(meta),
        tiles=tuple(tiles),
        global_shape=shapes[only] if only else None,
        aliases=aliases,
        fill=fill,
    )


def _by_tensor(meta: ParameterMetadata) -> dict[str, list[Tile]]:
    """Group a description's tiles by their canonical tensor; the tensor of an empty shard has none."""
    found: dict[str, list[Tile]] = {}
    for tile in tiles_of(meta):
        found.setdefault(tile.tensor, []).append(tile)
    return found or {canonical_name(meta): []}


def _filled(name: str, marks: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: marks[found[1]], name)


def _single_name(alias: str, rules: _Rules, subject: str) -> str:
    rule, marks = rules.find(alias, f"{subject} (tied)")
    if isinstance(rule, Fused):
        raise PlanError(f"{subject}: it is tied to {alias}, which names say is fused; register an untied model")
    return _filled(rule if isinstance(rule, str) else rule.tensor, marks)


def _with_shares(meta: ParameterMetadata, rule: Fused) -> ParameterMetadata:
    """Return the description with each rank's share of every part of the rows."""
    if rule.groups is not None or len(rule.parts) == 1 or not is_sharded(meta) or meta.partition_dim:
        return meta
    ways, rows = len(meta.tensor_parallel_group_ranks or ()), [part.rows for part in rule.parts]
    if meta.partition_sizes is not None or any(n % ways for n in rows):
        return meta
    if len(set(rows)) == 1:
        return replace(meta, partition_stride=len(rows), stride_is_known=True)
    return replace(meta, partition_stride=1, partition_sizes=[n // ways for n in rows], stride_is_known=True)


def _shape_problem(rule: Fused | Padded, name: str, held: Sequence[Tile], shape: tuple[int, ...] | None) -> str:
    """Return how a tensor differs from its rule, given its whole shape and the held tiles; "" if it does not."""
    dims = {len(tile.size) for tile in held} | ({len(shape)} if shape is not None else set())
    if 0 in dims:
        return "it has no rows, and names say that it is fused or padded"
    if isinstance(rule, Padded):
        if shape is not None and shape[0] < rule.rows:
            return f"it has {shape[0]} rows in the whole model, expected {rule.rows} or more for {rule.tensor}"
        return ""
    if any(part.is_transposed for part in rule.parts) and dims - {2}:
        return f"it has {max(dims)} dimensions, and names say that it is a transposed matrix"
    want = sum(part.rows for part in rule.parts)
    parts = " + ".join(f"{part.rows} of {part.tensor}" for part in rule.parts)
    if shape is not None and shape[0] != want:
        return f"it has {shape[0]} rows in the whole model, expected {want} ({parts})"
    if any(start + tile.size[0] > want for tile in held for start, _ in _rows_of(tile)):
        return f"it holds rows of {name} beyond the {want} that names say there are ({parts})"
    return ""


def _stack_problem(rule: Fused | Padded, marks: Mapping[str, str]) -> str:
    """Return an error text if a stacked tensor does not contain this expert; else ""."""
    for part in rule.parts if isinstance(rule, Fused) else ():
        if part.stack and int(marks["expert"]) >= part.stack:
            return f"it is expert {marks['expert']}, and names say that {part.tensor} has {part.stack} (from 0)"
    return ""


def _canonical_shape(part: Part, rows: int, trailing: Sequence[int]) -> tuple[int, ...]:
    """Return the whole shape of the canonical tensor that a part is of, which has this many rows."""
    shape = (*trailing, rows) if part.is_transposed else (rows, *trailing)
    return (part.stack, *shape) if part.stack else shape


def _rows_of(tile: Tile) -> list[tuple[int, int]]:
    """Return (first row, local offset) of each box of a tile; repeats along other dimensions count as one box."""
    r = tile.repeat
    if r is None or r.dim:
        return [(tile.offset[0], tile.local_offset)]
    return [(tile.offset[0] + i * r.step, tile.local_offset + i * r.local_step) for i in range(r.count)]


def _beside(tile: Tile) -> list[Tile]:
    """Return the tile without a repeat along dimensions other than rows, once for each time it is repeated."""
    r = tile.repeat
    if r is None or r.dim == 0:
        return [tile]
    found = []
    for i in range(r.count):
        offset = list(tile.offset)
        offset[r.dim] += i * r.step
        found.append(
            replace(tile, offset=tuple(offset), local_offset=tile.local_offset + i * r.local_step, repeat=None)
        )
    return found


def _composed(whole: Tile, rule: Fused, marks: Mapping[str, str]) -> Iterator[Tile]:
    """Yield the tiles of the canonical tensors in a tile of the fused tensor, for each part."""
    groups = rule.groups or 1
    for tile in _beside(whole):
        group, before = sum(part.rows for part in rule.parts) // groups, 0
        for part in rule.parts:
            here = part.rows // groups
            spots: dict[int, list[tuple[int, int]]] = {}
            for start, local in _rows_of(tile):
                end = start + tile.size[0]
                for number in range(start // group, min(groups, -(-end // group))):
                    begin = number * group + before
                    first, last = max(begin, start), min(begin + here, end)
                    if first < last:
                        place = local + (first - start) * tile.local_stride[0]
                        spots.setdefault(last - first, []).append((number * here + first - begin, place))
            for size, found in spots.items():
                joined = spaced(found, size, 0) if part.step == 1 else [(*spot, None) for spot in found]
                for row, place, repeat in joined:
                    offset, sizes = (row, *tile.offset[1:]), (size, *tile.size[1:])
                    yield _placed(Tile("", offset, sizes, place, tile.local_stride, repeat), part, marks)
            before += here


def _placed(box: Tile, part: Part, marks: Mapping[str, str]) -> Tile:
    """Return the tile of the canonical tensor for a box of a part's rows, which count from its first one."""
    offset, size, stride, repeat = list(box.offset), list(box.size), list(box.local_stride), box.repeat
    offset[0] = part.first + offset[0] * part.step
    if part.step > 1 and size[0] > 1:
        repeat = Repeat(0, size[0], part.step, stride[0])
        size[0] = 1
    dim = 0 if repeat is None else repeat.dim
    if part.is_transposed:
        offset, size, stride, dim = offset[::-1], size[::-1], stride[::-1], 1 - dim
    if part.stack:
        offset, stride, dim = [int(marks["expert"]), *offset], [prod(size) * max(1, *stride), *stride], dim + 1
        size = [1, *size]
    if repeat is not None:
        repeat = replace(repeat, dim=dim)
    name = _filled(part.tensor, marks)
    return Tile(name, tuple(offset), tuple(size), box.local_offset, tuple(stride), repeat)
