"""A layout learned from a loader is what the loader does: judged by running it on real values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import refitd
from refitd.describe.metadata import ParameterMetadata
from refitd.tracing.loader import LoaderTrace, check_layout, trace_loader

HALF = torch.float16
Weights = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[dict[str, torch.Tensor], Weights], None]


def numbered(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Canonical tensors in which no two elements are equal."""
    found, at = {}, 1
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(at, at + count).to(dtype).reshape(shape)
        at += count
    return found


def assembled(meta: ParameterMetadata, canonical: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a description says that a tensor holds."""
    out = torch.full(tuple(meta.shape), -1.0 if meta.fill is None else meta.fill, dtype=torch.float64)
    if meta.tiles is None:
        out.copy_(canonical[meta.resolved_name or meta.name])
        return out
    flat = out.reshape(-1)
    for tile in meta.tiles:
        r = tile.repeat
        for i in range(r.count if r else 1):
            offset, local = list(tile.offset), tile.local_offset
            if r:
                offset[r.dim] += i * r.step
                local += i * r.local_step
            box = canonical[tile.tensor][tuple(slice(o, o + n) for o, n in zip(offset, tile.size, strict=True))]
            flat.as_strided(tile.size, tile.local_stride, local).copy_(box)
    return out


def judge(
    params: dict[str, torch.Tensor], load: Load, shapes: dict[str, tuple[int, ...]], device: str = "cpu"
) -> LoaderTrace:
    """Trace a loader, run it for real, and compare."""
    held = {name: tensor.clone() for name, tensor in params.items()}
    traced = {
        name: torch.empty_strided(t.shape, t.stride(), device=device, dtype=t.dtype) for name, t in params.items()
    }
    if device == "cpu":
        traced = params
    wanted = {name: (shape, torch.float32) for name, shape in shapes.items()}
    trace = trace_loader(traced, lambda weights: load(traced, weights), wanted)
    for name, tensor in params.items():
        assert torch.equal(tensor, held[name]), f"{name} was written while its loader was traced"
    canonical = numbered(shapes)
    load(params, canonical.items())
    for name, meta in trace.metadata.items():
        assert torch.equal(assembled(meta, canonical), params[name].to(torch.float64)), name
    check_layout(trace, params, canonical.items())
    return trace


def empty(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fused_and_sharded_tensors(device: str) -> None:
    """qkv with replicated kv heads, gate and up, a padded vocabulary, all at rank 1 of 2 (kv: 1 head for both)."""
    heads, head, hidden = 4, 3, 8

    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        for name, w in weights:
            if name[0] in "qkv":
                mine = w.narrow(0, heads // 2 * head, heads // 2 * head) if name == "q" else w
                at = {"q": 0, "k": heads // 2 * head, "v": heads // 2 * head + head}[name]
                params["qkv"].data.narrow(0, at, mine.shape[0]).copy_(mine)
            elif name in ("gate", "up"):
                part = w.chunk(2, dim=0)[1]
                params["gate_up"][(name == "up") * 5 : (name == "up") * 5 + 5].copy_(part)
            elif name == "embed":
                mine = w[4:7]
                params["embed"][: mine.shape[0]].data.copy_(mine)
                params["embed"][mine.shape[0] :].data.fill_(0)
            else:
                params["down"].data.copy_(w.chunk(2, dim=1)[1])

    params = {
        "qkv": empty(12, hidden),
        "gate_up": empty(10, hidden),
        "embed": empty(4, hidden),
        "down": empty(hidden, 5),
    }
    shapes = {
        "q": (heads * head, hidden),
        "k": (head, hidden),
        "v": (head, hidden),
        "gate": (10, hidden),
        "up": (10, hidden),
        "embed": (7, hidden),
        "down": (hidden, 10),
    }
    trace = judge(params, load, shapes, device)
    assert not trace.problems() and trace.metadata.keys() == params.keys()
    assert trace.metadata["embed"].fill == 0.0 and trace.metadata["embed"].global_shape == (7, hidden)
    assert trace.metadata["down"].resolved_name == "down"


def test_experts_stacked_transposed_and_interleaved() -> None:
    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        for name, w in weights:
            if name.startswith("expert"):
                params["w13"][int(name[-1])].copy_(w.t())
            elif name == "gate_up":  # one gate row, one up row, ...
                params["gate"].copy_(w[::2])
                params["up"].copy_(w[1::2].contiguous())
            else:
                q = w.view(2, 4, 3, 5)  # groups of two q heads, k, v
                params["q"].copy_(q[:, :2].reshape(-1, 5))
                params["k"].copy_(q[:, 2].reshape(-1, 5))
                params["v"].copy_(q[:, 3].reshape(-1, 5))

    params = {"w13": empty(3, 5, 4), "gate": empty(4, 6), "up": empty(4, 6), "q": empty(12, 5), "k": empty(6, 5)}
    params["v"] = empty(6, 5)
    shapes = {"expert0": (4, 5), "expert1": (4, 5), "expert2": (4, 5), "gate_up": (8, 6), "qkv": (24, 5)}
    trace = judge(params, load, shapes)
    assert not trace.problems()


def test_what_a_converter_builds_on_the_way_is_followed() -> None:
    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        w = dict(weights)
        params["cat"].copy_(torch.cat([w["a"], w["b"].t().contiguous()], dim=0))
        params["stack"].copy_(torch.stack([w["a"], w["a"].flip(0).flip(0) if False else w["a"]], dim=1))
        params["pad"].copy_(torch.nn.functional.pad(w["a"], (0, 0, 0, 2)))
        fresh = torch.zeros(4, 6)
        fresh[:3, 1:5] = w["a"]
        params["fresh"].copy_(fresh)
        params["repeat"].copy_(w["c"].repeat(2, 1))
        params["repeat_interleave"].copy_(w["c"][:, None].expand(2, 3, 4).reshape(6, 4))
        params["picked"].copy_(w["a"][torch.tensor([2, 0, 1])])
        params["wide"].copy_(w["a"].to(torch.float64).to(torch.float32))
        params["scalar"].data.fill_(w["s"].item())

    params = {
        "cat": empty(8, 4),
        "stack": empty(3, 2, 4),
        "pad": empty(5, 4),
        "fresh": empty(4, 6),
        "repeat": empty(4, 4),
        "repeat_interleave": empty(6, 4),
        "picked": empty(3, 4),
        "wide": empty(3, 4),
        "scalar": empty(1),
    }
    judge(params, load, {"a": (3, 4), "b": (4, 5), "c": (2, 4), "s": (1,)})


def test_modules_load_their_own_state() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    params = {name: p.detach() for name, p in module.state_dict().items()}
    shapes = {name: tuple(p.shape) for name, p in params.items()}
    trace = judge(params, lambda _, weights: module.load_state_dict(dict(weights)) and None, shapes)
    assert all(meta.tiles is None for meta in trace.metadata.values()) and not trace.problems()


def test_a_tensor_fused_from_two_dtypes_is_computed_and_the_others_are_learned() -> None:
    params = {"fused": torch.empty(4, 3, dtype=torch.bfloat16), "plain": empty(2, 3)}

    def load(weights: Weights) -> None:
        for name, weight in weights:
            params["fused"][{"a": slice(0, 2), "b": slice(2, 4)}[name]].copy_(weight)
            if name == "a":
                params["plain"].copy_(weight)

    offered = {"a": ((2, 3), torch.float32), "b": ((2, 3), torch.bfloat16)}
    trace = refitd.trace_loader(params, load, offered)
    assert trace.computed == {"fused": ("a", "b")} and [*trace.metadata] == ["plain"]


def test_tied_and_untouched_and_unused_tensors_are_told() -> None:
    w = empty(4, 3)
    params = {"embed": w, "head": w, "cos": empty(5)}

    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        for name, weight in weights:
            if name == "embed":
                params["embed"].data.copy_(weight)

    trace = judge(params, load, {"embed": (4, 3), "extra": (2,)})
    assert trace.untouched == ("cos",) and trace.unused == ("extra",)
    assert trace.metadata["embed"].resolved_name == trace.metadata["head"].resolved_name == "embed"
    assert trace.problems() == ["extra: the loader takes nothing of it"]


def test_what_is_computed_is_told_with_what_it_is_made_of() -> None:
    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        w = dict(weights)
        params["norm"].copy_(w["a"] + 1)
        params["fused"].copy_(w["a"] @ w["b"])
        params["scaled"].copy_(w["b"])
        params["scaled"].mul_(2)
        params["plain"].copy_(w["b"])

    params = {"norm": empty(3, 4), "fused": empty(3, 3), "scaled": empty(4, 3), "plain": empty(4, 3)}
    trace = judge(params, load, {"a": (3, 4), "b": (4, 3)})
    assert trace.computed == {"norm": ("a",), "fused": ("a", "b"), "scaled": ("b",)} and [*trace.metadata] == ["plain"]


def test_casts_are_declared() -> None:
    params = {"w": torch.zeros(4, 3, dtype=torch.bfloat16)}
    trace = trace_loader(params, lambda ws: [params["w"].copy_(w) for _, w in ws], {"w": ((4, 3), torch.float32)})
    assert trace.metadata["w"].cast_from == "float32" and trace.metadata["w"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("held", "dtype"), [("int32", torch.int64), ("int32", torch.float32), ("float32", torch.float8_e4m3fn)]
)
def test_a_conversion_that_no_worker_does_is_computed(held: str, dtype: torch.dtype) -> None:
    params = {"w": torch.zeros(4, 3, dtype=dtype)}
    shapes = {"w": ((4, 3), getattr(torch, held))}
    trace = trace_loader(params, lambda ws: [params["w"].copy_(w) for _, w in ws], shapes)
    assert trace.computed == {"w": ("w",)} and not trace.metadata


def test_overlapping_windows_are_tiles_of_their_own() -> None:
    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        for _, w in weights:
            params["w"].copy_(w.reshape(-1).unfold(0, 16, 8))

    trace = judge({"w": empty(5, 16)}, load, {"a": (12, 4)})
    assert all(tile.repeat is None or tile.repeat.step >= tile.size[0] for tile in trace.metadata["w"].tiles or ())


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (lambda p, w: p["w"][:2].copy_(w["a"][:2]), "writes 8 of its 16 elements"),
        (lambda p, w: p["w"].copy_(w["b"]), "the loader raised"),
        (lambda p, w: w["nothing"], "the loader raised"),
        (lambda p, w: p["w"].fill_(w["a"].max().item()), "needs a value"),
        (lambda p, w: p["w"].fill_(min(w["s"].item(), 4.0)), r"reads s as a condition, at .*test_loader\.py:\d+:"),
        (lambda p, w: (p["w"].copy_(w["a"]), p["w"][3:].fill_(0)), "writes parts of what it takes of a over again"),
        (lambda p, w: (p["w"][:2].fill_(0), p["w"][:2].copy_(w["a"][:2]), p["w"][2].fill_(0)), "writes 12 of its 16"),
        (lambda p, w: (p["w"][:1].copy_(w["a"][:1]), p["w"][1:2].fill_(1), p["w"][2:].fill_(2)), "one value can be"),
        (lambda p, w: p["w"].set_(w["a"]), "gives it other memory"),
        (lambda p, w: setattr(p["w"], "data", torch.empty(4, 4)), "gives 1 tensors other memory; put back"),
        (lambda p, w: setattr(p["w"], "data", p["w"].data.t()), "gives 1 tensors other memory; put back"),
        (lambda p, w: setattr(p["w"], "data", p["w"].data.view(HALF)), "gives 1 tensors other memory; put back"),
        (lambda p, w: torch.from_numpy(p["w"].detach().numpy()).copy_(w["a"]), "memory that numpy or DLPack share"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(load: Callable[..., object], says: str) -> None:
    params = {"w": torch.nn.Parameter(empty(4, 4))}
    place, shapes = params["w"].data_ptr(), {"a": ((4, 4), torch.float32), "b": ((5, 5), torch.float32)}
    shapes["s"] = ((1,), torch.float32)
    with pytest.raises(refitd.RefitdError, match=says):
        trace_loader(params, lambda weights: load(params, dict(weights)), shapes)
    assert params["w"].data_ptr() == place and torch.equal(params["w"], empty(4, 4))
    assert params["w"].dtype == torch.float32 and params["w"].is_contiguous()


def test_an_assertion_without_a_word_says_what_was_offered() -> None:
    def load(weights: Weights) -> None:
        for _, w in weights:
            assert w.shape == (4, 4)

    shapes = {"a": ((4, 4), torch.float32), "b": ((5, 4), torch.bfloat16)}
    with pytest.raises(refitd.RefusedError, match=r"at 'b', which is offered as \[5, 4\] of bfloat16: AssertionError"):
        trace_loader({"w": empty(4, 4)}, load, shapes)


@pytest.mark.parametrize(
    "load",
    [
        lambda p, w: p["w"].copy_(w["a"].to(HALF).float()),  # rounded on the way, to what the tensor is not
        lambda p, w: p["w"].copy_(torch.stack([w["a"], w["a"]]).to(HALF)[0]),
        lambda p, w: p["w"].copy_(w["a"].view(torch.int32)),  # bits, taken for numbers
        lambda p, w: p["w"].view(torch.int32).copy_(w["a"].view(torch.int32)),
        lambda p, w: p["w"].view(torch.uint8)[:, :4].copy_(w["a"].view(torch.uint8)[:, :4]),
        lambda p, w: p["w"].copy_(torch._neg_view(w["a"])),
        lambda p, w: p["w"].copy_(w["a"].t().clone().as_strided((4, 4), (4, 1))),  # as it lies, which is otherwise
        lambda p, w: p["w"].fill_(w["s"].item() % 4.0),
        lambda p, w: (p["w"].copy_(w["a"]), p["w"][0].copy_(torch.tensor(w["s"].item()))),
        lambda p, w: (p["w"].copy_(w["a"]), p["w"].__setitem__((0, 0), 2 * w["s"].item())),
        lambda p, w: p["w"].copy_(torch.nn.functional.pad(w["a"][:2], (0, 0, 0, 2), value=w["s"].item())),
        lambda p, w: p["w"].copy_(torch.full((4, 4), w["s"].item()).slice_scatter(w["a"][:2], 0, 0, 2)),
        lambda p, w: p["w"].copy_(torch.cat([torch.arange(8.0).view(2, 4), w["a"][:2]])),
        lambda p, w: p["w"].copy_(
            written(torch.arange(16.0).view(4, 4), torch.nn.functional.pad(w["a"][:1], (0, 0, 0, 1)))
        ),
        lambda p, w: (p["w"].fill_(5), p["w"].copy_(written(torch.zeros(4, 4), w["a"][:2], w["a"][:1], w["a"][1:2]))),
        lambda p, w: (p["other"].copy_(w["a"]), p["w"].copy_(p["other"])),  # what the engine holds at present
        lambda p, w: (p["other"].copy_(w["a"]), p["w"].copy_(p["other"].t().contiguous())),
        lambda p, w: (p["other"].copy_(w["a"]), p["w"].copy_(torch.cat([p["other"][:2], w["a"][2:]]))),
    ],
)
def test_what_is_no_plain_copy_is_never_taken_for_one(load: Callable[..., object]) -> None:
    params = {"w": torch.ones(4, 4), "other": torch.ones(4, 4)}
    shapes = {"a": ((4, 4), torch.float32), "s": ((1,), torch.float32)}
    trace = trace_loader(params, lambda weights: load(params, dict(weights)), shapes)
    assert "w" in trace.computed and "w" not in trace.metadata
    assert trace.computed["w"], "what it is made of is told"


def written(buffer: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """Return a buffer of the loader's own after writing each part to its first rows, the third to its second row."""
    for index, part in enumerate(parts):
        start = index // 2
        buffer[start : start + len(part)].copy_(part)
    return buffer


@pytest.mark.parametrize(
    ("fill", "dtype", "held"),
    [
        (0.1, torch.float32, torch.tensor(0.1).item()),
        (0.1, torch.bfloat16, torch.tensor(0.1, dtype=torch.bfloat16).item()),
        (2.7, torch.uint8, 2.0),
        (-1, torch.uint8, 255.0),
        (2, torch.bool, 1.0),
    ],
)
def test_a_fill_is_the_value_that_the_tensor_holds_of_it(fill: float, dtype: torch.dtype, held: float) -> None:
    params = {"w": torch.zeros(4, 3, dtype=dtype)}

    def load(weights: Weights) -> None:
        params["w"].fill_(fill)
        for _, w in weights:
            params["w"][:2].copy_(w)

    trace = trace_loader(params, load, {"a": ((2, 3), dtype)})
    assert trace.metadata["w"].fill == held
    checkpoint = torch.ones(2, 3).to(dtype)
    load([("a", checkpoint)])
    check_layout(trace, params, [("a", checkpoint)])


def test_a_fill_that_a_narrower_type_has_rounded_is_that_one_wherever_it_is_copied() -> None:
    params = {"w": empty(4, 3)}
    pad = torch.nn.functional.pad
    shapes = {"a": ((2, 3), HALF)}
    trace = trace_loader(params, lambda ws: [params["w"].copy_(pad(w, (0, 0, 0, 2), value=0.1)) for _, w in ws], shapes)
    assert trace.metadata["w"].fill == torch.tensor(0.1, dtype=HALF).item()


def test_an_integer_that_no_fill_can_say_is_no_constant() -> None:
    params = {"w": torch.zeros(4, dtype=torch.int64)}

    def load(weights: Weights) -> None:
        params["w"].fill_(2**60 + 1)
        for _, w in weights:
            params["w"][:2].copy_(w)

    assert "w" in trace_loader(params, load, {"a": ((2,), torch.int64)}).computed


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -0.0, 0.1])
def test_any_fill_that_the_engine_holds_is_checked_by_its_bits(fill: float) -> None:
    params = {"w": torch.full((3,), fill)}
    shapes = {"a": ((2,), torch.float32)}
    trace = trace_loader(
        params, lambda ws: [(params["w"].fill_(fill), params["w"][:2].copy_(w)) for _, w in ws], shapes
    )
    params["w"][:2] = 1
    check_layout(trace, params, [("a", torch.ones(2))])
    params["w"][2] = 7
    with pytest.raises(refitd.RefusedError, match="w \\(from nothing, but filled\\)"):
        check_layout(trace, params, [("a", torch.ones(2))])


def test_tensors_without_dimensions_are_learned_and_checked() -> None:
    params = {"scale": torch.zeros(()), "scales": torch.zeros(2)}

    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        for name, w in weights:
            if name == "a":
                params["scale"].copy_(w)
            params["scales"]["ab".index(name)] = w

    judge(params, load, {"a": (), "b": ()})


def test_a_buffer_that_is_written_over_whole_holds_what_was_written_last() -> None:
    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        buffer = torch.empty(2, 3)
        for name, w in weights:
            buffer.copy_(w)
            params[name].copy_(buffer)
            buffer.mul_(2)
            params[f"half of {name}"].copy_(buffer[:1])
            buffer.zero_()
            buffer[:1].copy_(w[:1])
            params[f"padded {name}"].copy_(buffer)

    params = {name: torch.zeros(2, 3) for c in "ab" for name in (c, f"padded {c}")}
    params |= {f"half of {c}": torch.zeros(1, 3) for c in "ab"}
    trace = judge(params, load, dict.fromkeys("ab", (2, 3)))
    assert {*trace.metadata} == {"a", "b", "padded a", "padded b"}


EVEN = torch.arange(6) % 2 == 0


@pytest.mark.parametrize(
    "select",
    [
        lambda w: w[[5, 3, 1, 0, 2, -2]],
        lambda w: w[np.array([5, 3, 1, 0, 2, 4])],
        lambda w: w[range(5, -1, -1)],
        lambda w: w[:, [3, 1, 0, 2]],
        lambda w: torch.cat([w[EVEN], w[~EVEN]]),
        lambda w: torch.cat([w[[True, False] * 3], w[[False, True] * 3]]),
    ],
    ids=["list", "numpy", "range", "list of columns", "mask", "list of booleans"],
)
def test_rows_that_a_constant_list_or_mask_selects_are_followed(select: Callable[..., torch.Tensor]) -> None:
    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        for _, w in weights:
            params["p"].copy_(select(w))

    assert "p" in judge({"p": torch.zeros(6, 4)}, load, {"w": (6, 4)}).metadata


def test_memory_made_in_the_form_of_another_tensor_is_followed() -> None:
    """As loaders pad and fuse: `new_zeros`, `empty_like` and their kin, and constants joined to a canonical tensor."""

    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        a = dict(weights)["a"]
        params["new"].copy_(torch.cat([a, a.new_zeros(2, 4)]))
        params["full"].copy_(written(a.new_full((6, 4), 3.0), a))
        params["joined"].copy_(torch.cat([torch.ones(2, 4), a]))
        params["empty"].copy_(written(torch.empty_like(params["empty"]), a))
        params["turned"].copy_(written(torch.zeros_like(a.t()), a))

    shapes = {"new": (6, 4), "full": (6, 4), "joined": (6, 4), "empty": (4, 4), "turned": (4, 4)}
    trace = judge({name: empty(*shape) for name, shape in shapes.items()}, load, {"a": (4, 4)})
    assert [*trace.metadata] == [*shapes] and not trace.computed


def test_a_cast_to_the_tensors_own_type_is_a_declared_one_however_it_is_written() -> None:
    params = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    shapes = {"a": ((4, 4), torch.float32)}
    for load in (
        lambda w: w,
        lambda w: w.to(torch.bfloat16),
        lambda w: w.to(torch.bfloat16).t().contiguous().t(),
    ):
        trace = trace_loader(params, lambda ws, load=load: [params["w"].copy_(load(w)) for _, w in ws], shapes)
        assert trace.metadata["w"].cast_from == "float32"


def test_tensors_that_are_parts_of_one_buffer_are_followed_apart_and_never_past_their_ends() -> None:
    flat = torch.zeros(20)
    params = {"first": flat[:12].view(3, 4), "second": flat[12:]}
    shapes = {"a": ((3, 4), torch.float32), "b": ((8,), torch.float32), "c": ((20,), torch.float32)}

    def load(weights: Weights) -> None:
        w = dict(weights)
        params["first"].copy_(w["a"])
        params["second"].copy_(w["b"])

    trace = trace_loader(params, load, shapes)
    assert trace.metadata["first"].resolved_name == "a" and trace.metadata["second"].resolved_name == "b"
    with pytest.raises(refitd.PlanError, match="writes beyond"):
        trace_loader(params, lambda weights: flat.copy_(dict(weights)["c"]), shapes)


def test_what_is_written_over_whole_is_what_was_written_last() -> None:
    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        w = dict(weights)
        params["w"].fill_(7)
        params["w"].copy_(w["a"])
        params["w"].copy_(w["b"])
        params["half"].zero_()
        params["half"][:2].copy_(w["a"][:2])
        params["half"][:2].copy_(w["b"][2:])

    trace = judge({"w": empty(4, 6), "half": empty(4, 6)}, load, {"a": (4, 6), "b": (4, 6)})
    assert trace.metadata["w"].resolved_name == "b" and trace.metadata["half"].fill == 0.0


def test_a_layout_is_not_trusted_where_the_engine_holds_something_else() -> None:
    params = {"w": empty(4, 6)}

    def load(weights: Weights) -> None:
        for _, w in weights:
            params["w"].copy_(w)

    trace = trace_loader(params, load, {"w": ((4, 6), torch.float32)})
    checkpoint = numbered({"w": (4, 6)})
    load(checkpoint.items())
    check_layout(trace, params, checkpoint.items())
    params["w"].copy_(params["w"].reshape(6, 4).t().reshape(4, 6).clone())  # "repacked" after loading
    with pytest.raises(refitd.RefusedError, match=r"1 tensors do not hold .*: w \(from w\)"):
        check_layout(trace, params, checkpoint.items())
    padded = {"w": empty(4, 6)}
    trace_padded = trace_loader(
        padded, lambda ws: [(padded["w"][:3].copy_(w), padded["w"][3:].fill_(0)) for _, w in ws], {"w": ((3, 6), HALF)}
    )
    weights = {"w": torch.ones(3, 6, dtype=HALF)}
    padded["w"][:3] = 1
    check_layout(trace_padded, padded, weights.items())
    padded["w"][3, 5] = 2
    with pytest.raises(refitd.RefusedError, match="1 tensors do not hold"):
        check_layout(trace_padded, padded, weights.items())
    with pytest.raises(refitd.RefusedError, match="lacks 1 tensors that the engine loads: w"):
        check_layout(trace, params, [])


# --- any loader that only moves ---------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[object, ...]]:
    kinds = ["narrow", "t", "view", "contiguous", "chunk", "cat", "flatten", "unsqueeze", "to", "stack", "index"]
    return [(draw(st.sampled_from(kinds)), draw(st.integers(0, 1 << 20))) for _ in range(draw(st.integers(0, 6)))]


def run(program: list[tuple[object, ...]], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for kind, seed in program:
        assert isinstance(seed, int)
        dim = seed % max(1, x.dim())
        n = x.shape[dim] if x.dim() else 1
        if x.numel() > 4000 or not x.dim():
            break
        if kind == "narrow":
            start = seed // 7 % n
            x = x.narrow(dim, start, seed // 31 % (n - start) + 1)
        elif kind == "t":
            x = x.transpose(dim, seed // 5 % x.dim())
        elif kind == "view":
            parts = [d for d in range(1, n + 1) if n % d == 0]
            x = x.unflatten(dim, (parts[seed // 3 % len(parts)], -1)) if x.dim() < 4 else x
        elif kind == "contiguous":
            x = x.contiguous()
        elif kind == "chunk":
            pieces = x.chunk(seed // 11 % 3 + 1, dim)
            x = pieces[seed % len(pieces)]
        elif kind == "cat":
            x = torch.cat([x, y.reshape(-1)[: x.numel()].reshape(x.shape) if x.numel() <= y.numel() else x], dim)
        elif kind == "flatten":
            x = x.reshape(-1) if seed % 2 else x.flatten(max(0, dim - 1), dim)
        elif kind == "unsqueeze":
            x = x.unsqueeze(dim) if x.dim() < 4 else x
        elif kind == "to":
            x = x.to(torch.float64).to(torch.float32)
        elif kind == "stack":
            x = torch.stack([x, x], dim) if x.dim() < 4 else x
        elif kind == "index":
            x = x.index_select(dim, torch.tensor([seed % n, seed // 3 % n]))
    return x


@given(programs(), programs())
@settings(max_examples=400, deadline=None)
def test_any_loader_that_only_moves_elements(first: list[tuple[object, ...]], second: list[tuple[object, ...]]) -> None:
    shapes = {"x": (6, 4, 2), "y": (12, 5)}
    canonical = numbered(shapes)
    made = [run(p, canonical["x"], canonical["y"]) for p in (first, second)]
    params = {f"p{i}": torch.zeros(m.shape) for i, m in enumerate(made)}

    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        w = dict(weights)
        for i, program in enumerate((first, second)):
            params[f"p{i}"].copy_(run(program, w["x"], w["y"]))

    trace = judge(params, load, shapes)
    assert not trace.computed and trace.metadata.keys() == params.keys()


WRITES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 5), st.integers(1, 6), st.integers(-2, 3)),
    max_size=6,
)


@given(WRITES)
@settings(max_examples=400)
def test_writes_over_one_another_are_what_is_left_of_them_or_refused(writes: list[tuple[int, ...]]) -> None:
    """Boxes of a tensor, each taken from a canonical one or filled, in any order."""
    shapes = {"a": (6, 6), "b": (6, 6)}

    def load(params: dict[str, torch.Tensor], weights: Weights) -> None:
        w = dict(weights)
        for row, rows, column, columns, what in writes:
            box = params["w"][row : row + rows, column : column + columns]
            if what < 0:
                box.fill_(float(what))
            else:
                source = w["ab"[what % 2]]
                box.copy_(source[: box.shape[0], : box.shape[1]] if what < 2 else source[row, column].expand(box.shape))

    params = {"w": torch.full((6, 6), 99.0)}
    try:
        trace = judge(params, load, shapes)
    except refitd.PlanError:
        return
    if trace.metadata:
        assert not (params["w"] == 99.0).any(), "what the loader leaves is not declared"


@pytest.mark.parametrize(
    "change",
    [
        lambda w: torch.mul(w, 2, out=w),
        lambda w: torch._foreach_mul_([w], 2),
        lambda w: torch.aminmax(torch.ones(4, 3), dim=0, out=(w[0], w[1])),
        lambda w: torch._foreach_copy_([torch.empty(4, 3), w], [torch.ones(4, 3), torch.ones(4, 3)]),
    ],
)
def test_writes_to_out_and_to_lists_are_seen(change: Callable[[torch.Tensor], object]) -> None:
    params = {"w": torch.zeros(4, 3), "cat": torch.zeros(8, 3), "scratch": torch.zeros(4, 3)}

    def load(weights: Weights) -> None:
        for _, weight in weights:
            params["w"].copy_(weight)
            change(params["w"])
            assert torch.cat([weight, weight], out=params["cat"]) is params["cat"]
            params["scratch"].copy_(torch.neg(weight, out=torch.empty(4, 3)))

    trace = trace_loader(params, load, {"w": ((4, 3), torch.float32)})
    assert trace.computed == dict.fromkeys(params, ("w",)) and not trace.metadata
    assert not any(tensor.any() for tensor in params.values())
