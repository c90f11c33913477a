"""A layout learned from a loader equals the loader's result on real values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

import refitd
from refitd.tracing.loader import LoaderTrace, check_layout, trace_loader
from tests.loaders.judge import applied

HALF = torch.float16
Weights = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[dict[str, torch.Tensor], Weights], None]


def numbered(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return canonical tensors whose elements all differ."""
    found, at = {}, 1
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(at, at + count).to(dtype).reshape(shape)
        at += count
    return found


def judge(params: dict[str, torch.Tensor], load: Load, shapes: dict[str, tuple[int, ...]]) -> LoaderTrace:
    """Trace a loader, run it for real, and compare."""
    held = {name: tensor.clone() for name, tensor in params.items()}
    wanted = {name: (shape, torch.float32) for name, shape in shapes.items()}
    trace = trace_loader(params, lambda weights: load(params, weights), wanted)
    for name, tensor in params.items():
        assert torch.equal(tensor, held[name]), f"{name} was written while its loader was traced"
    canonical = numbered(shapes)
    load(params, canonical.items())
    for name, meta in trace.metadata.items():
        assert torch.equal(applied(meta, canonical), params[name]), name
    check_layout(trace, params, canonical.items())
    return trace


def empty(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


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
    assert trace.problems() == ["extra: the loader does not use it"]


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
        (lambda p, w: (p["w"].copy_(w["a"]), p["w"][3:].fill_(0)), "overwrites a part of its copy of a"),
        (lambda p, w: (p["w"][:2].fill_(0), p["w"][:2].copy_(w["a"][:2]), p["w"][2].fill_(0)), "writes 12 of its 16"),
        (lambda p, w: (p["w"][:1].copy_(w["a"][:1]), p["w"][1:2].fill_(1), p["w"][2:].fill_(2)), "one value can be"),
        (lambda p, w: p["w"].set_(w["a"]), "gives it other memory"),
        (lambda p, w: setattr(p["w"], "data", p["w"].data.t()), "gives 1 tensors other memory; it was restored"),
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
        lambda p, w: p["w"].copy_(w["a"].to(HALF).float()),  # rounded through another type
        lambda p, w: p["w"].copy_(torch.stack([w["a"], w["a"]]).to(HALF)[0]),
        lambda p, w: p["w"].copy_(w["a"].view(torch.int32)),  # bits read as numbers
        lambda p, w: p["w"].view(torch.int32).copy_(w["a"].view(torch.int32)),
        lambda p, w: p["w"].view(torch.uint8)[:, :4].copy_(w["a"].view(torch.uint8)[:, :4]),
        lambda p, w: p["w"].copy_(torch._neg_view(w["a"])),
        lambda p, w: p["w"].copy_(w["a"].t().clone().as_strided((4, 4), (4, 1))),  # reads transposed memory
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
        lambda p, w: (p["other"].copy_(w["a"]), p["w"].copy_(p["other"])),  # the engine's present content
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
    """Return the loader's buffer after writing each part to its first rows, and the third part to its second row."""
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
    """Pad and fuse as loaders do: `new_zeros`, `empty_like` and similar, and constants joined to a canonical tensor."""

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
    with pytest.raises(refitd.RefusedError, match=r"1 tensors differ from .*: w \(from w\)"):
        check_layout(trace, params, checkpoint.items())
    padded = {"w": empty(4, 6)}
    trace_padded = trace_loader(
        padded, lambda ws: [(padded["w"][:3].copy_(w), padded["w"][3:].fill_(0)) for _, w in ws], {"w": ((3, 6), HALF)}
    )
    weights = {"w": torch.ones(3, 6, dtype=HALF)}
    padded["w"][:3] = 1
    check_layout(trace_padded, padded, weights.items())
    padded["w"][3, 5] = 2
    with pytest.raises(refitd.RefusedError, match="1 tensors differ from"):
        check_layout(trace_padded, padded, weights.items())
    with pytest.raises(refitd.RefusedError, match="lacks 1 tensors that the engine loads: w"):
        check_layout(trace, params, [])


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
