"""Describe the tensors that each kind of rank of a layout holds."""

from __future__ import annotations

from collections.abc import Iterator

from refitd.describe.layout import elements
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.names import expert_range
from refitd.describe.tiles import Tile
from refitd.dtypes import ELEMENT_SIZES
from refitd.offline.cut import RankCut, cut_of
from refitd.offline.layouts import Kind, expert_fsdp_of, group_of, stage_layers
from refitd.offline.models import span_of
from refitd.offline.values import Layout, TensorSpec


class Describer:
    """Makes the descriptions of each kind of rank of one layout, with tiles instead of groups, so without ranks."""

    def __init__(self, layout: Layout) -> None:
        assert layout.model is not None
        self.layout = layout
        self.model = layout.model
        self.cuts: dict[tuple[int, int, int], RankCut] = {}

    def tensors(self, kind: Kind) -> Iterator[ParameterMetadata]:
        """Yield the descriptions of all tensors of a kind of rank."""
        stage, tp, ep, etp, shard, expert_shard = kind
        layout, model = self.layout, self.model
        held_layers = stage_layers(layout, stage)
        held_experts = expert_range(model.experts, layout.ep, ep) if model.experts else range(0)
        for number, spec in enumerate(model.tensors):
            is_expert = "{expert}" in spec.name
            index = etp if group_of(spec, layout)[0] == "etp" else tp
            place = expert_shard if is_expert else shard
            key = (number, index, place)
            if key not in self.cuts:
                self.cuts[key] = cut_of(
                    spec, layout, index, place, expert_fsdp_of(layout) if is_expert else layout.fsdp
                )
            cut = self.cuts[key]
            experts = _common(held_experts, span_of(spec.experts, model.experts)) if is_expert else range(1)
            for layer in self._layers(spec, stage, held_layers):
                if spec.fused is not None and len(experts):
                    yield self._fused(spec, cut, layer, experts)
                    continue
                for expert in experts:
                    yield self._one(spec, cut, layer, expert)

    def _layers(self, spec: TensorSpec, stage: int, held: range) -> range:
        if "{layer}" in spec.name:
            return _common(held, span_of(spec.layers, self.model.layers))
        stages = (spec.stage,) if isinstance(spec.stage, str) else spec.stage or ()
        is_here = (
            "every" in stages
            or ("first" in stages and stage == 0)
            or ("last" in stages and stage == self.layout.pp - 1)
        )
        return range(1) if is_here else range(0)

    def _one(self, spec: TensorSpec, cut: RankCut, layer: int, expert: int) -> ParameterMetadata:
        name, names = _filled(spec.name, layer, expert), _canonical(spec, layer, expert)
        dtype = spec.dtype or self.model.dtype
        # the shape alone describes a whole tensor
        is_whole = spec.parts is None and cut.shape == tuple(spec.shape)
        return ParameterMetadata(
            name=name,
            shape=cut.shape,
            dtype=dtype,
            element_size=ELEMENT_SIZES[dtype],
            resolved_name=names[0] if spec.parts is None else name,
            tiles=None
            if is_whole
            else tuple(
                Tile(names[n], offset, size, local, cut.strides, repeat) for n, offset, size, local, repeat in cut.tiles
            ),
            global_shape=None if is_whole or spec.parts is not None else tuple(spec.shape),
        )

    def _fused(self, spec: TensorSpec, cut: RankCut, layer: int, experts: range) -> ParameterMetadata:
        """Describe all experts of a rank as one tensor, one after the other."""
        assert spec.fused is not None
        dtype, each = spec.dtype or self.model.dtype, elements(cut.shape)
        name = _filled(spec.fused, layer, 0)
        tiles = tuple(
            Tile(names[n], offset, size, nth * each + local, cut.strides, repeat)
            for nth, names in enumerate(_canonical(spec, layer, expert) for expert in experts)
            for n, offset, size, local, repeat in cut.tiles
        )
        return ParameterMetadata(
            name=name,
            shape=(len(experts), *cut.shape),
            dtype=dtype,
            element_size=ELEMENT_SIZES[dtype],
            resolved_name=name,
            tiles=tiles,
        )


def _filled(pattern: str, layer: int, expert: int) -> str:
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def _canonical(spec: TensorSpec, layer: int, expert: int) -> list[str]:
    patterns = [part.tensor for part in spec.parts] if spec.parts is not None else [spec.tensor or spec.name]
    return [_filled(pattern, layer, expert) for pattern in patterns]


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))
