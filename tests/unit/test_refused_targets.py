"""Targets that cannot be written exactly are refused by name at registration."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from refitd import Derived, MXFP8Buffer, ParameterMetadata, RefitdError, RefusedError, Tile
from refitd.client.source_tensors import SourceTensors
from refitd.client.target_tensors import TargetTensors
from refitd.describe.memory import extents, met, overlapping, overlaps_itself


def target(tensors: Any, metadata: Any = None, derived: Any = None) -> TargetTensors:
    return TargetTensors(tensors, 0, metadata, None, None, False, derived)


def described(**names: tuple[tuple[int, ...], Any]) -> list[ParameterMetadata]:
    return [
        ParameterMetadata(name=name, shape=shape, dtype=torch.float32, element_size=4, owner_rank=0, **dict(more))
        for name, (shape, more) in names.items()
    ]


def read_only(path: Path) -> torch.Tensor:
    path.write_bytes(bytes(16384))
    with path.open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once in a process that this memory is not writable
        return torch.frombuffer(held, dtype=torch.float32)


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(4)


def two() -> torch.Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(4), torch.ones(4))


def freed() -> torch.Tensor:
    tensor = torch.zeros(8)[4:]
    tensor.untyped_storage().resize_(0)
    return tensor


NOT_DENSE: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.empty(4, device="meta"), "meta device"),
    "fake": (fake, "fake tensor"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "mkldnn": (lambda: torch.ones(4).to_mkldnn(), "mkldnn"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "quantized"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
    "conjugate": (lambda: torch.ones(4, dtype=torch.complex64).conj(), "conjugate"),
    "negative": (lambda: torch.ones(4, dtype=torch.complex64).conj().imag, "negative"),
    "complex32": (lambda: torch.zeros(4, dtype=torch.complex32), "complex32"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "UninitializedParameter"),
    "subclass": (two, "TwoTensor"),
    "freed": (freed, "freed"),
    "number": (lambda: 3, "int 3"),
    "path": (lambda: Path("w.pt"), "PosixPath"),
    "None": (lambda: None, "None"),
}


@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("registered", [target, lambda t: SourceTensors(t, 0, None, None, None)])
def test_what_is_no_dense_tensor_in_memory_is_refused_by_name(kind: str, registered: Callable[[Any], Any]) -> None:
    make, said = NOT_DENSE[kind]
    with pytest.raises(RefusedError, match=rf"layers\.0\.w: .*{said}"):
        registered({"ok": torch.zeros(2), "layers.0.w": make()})


def test_a_lazy_module_and_what_is_no_module_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"0\.weight: it is an UninitializedParameter"):
        target(nn.Sequential(nn.LazyLinear(3)))
    for wrong in ("weights.pt", Path("weights.pt"), None, 3, [torch.zeros(3)], nn.Linear(2, 2).parameters()):
        with pytest.raises(RefusedError, match="module_or_tensors"):
            target(wrong)
    with pytest.raises(RefusedError, match="a key is 3"):
        target({3: torch.zeros(3)})
    frozen = torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval()))
    for registered in (frozen, [frozen]):
        with pytest.raises(RefusedError, match=r"torch\.jit\.freeze makes constants"):
            target(registered)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3, 1).expand(3, 4), torch.zeros(1).expand(5), torch.zeros(8).unfold(0, 3, 1)],
    ids=["expanded", "one element", "windows"],
)
def test_a_target_whose_elements_share_a_place_is_refused_and_a_source_is_not(tensor: torch.Tensor) -> None:
    with pytest.raises(RefusedError, match="w: several of its elements lie in one place"):
        target({"w": tensor})
    SourceTensors({"w": tensor, "v": tensor}, 0, None, None, None)


def test_memory_that_nobody_may_write_is_refused_and_read(tmp_path: Path) -> None:
    tensor = read_only(tmp_path / "w")
    with pytest.raises(RefusedError, match="w: its memory cannot be written"):
        target({"w": tensor})
    SourceTensors({"w": tensor}, 0, None, None, None)
    with pytest.raises(RefusedError, match="w: its memory cannot be written"):
        target({"w": torch.from_numpy(np.memmap(tmp_path / "w", np.float32, "r"))})
    target({"w": torch.from_numpy(np.memmap(tmp_path / "w", np.float32, "c"))})


t = torch.zeros(8, 12)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": t, "b": t},
        {"a": t[:4], "b": t[3:]},
        {"a": t[:, :5], "b": t[:, 4:]},
        {"a": t, "b": t.view(torch.int32)},
        {"a": t.t(), "b": t},
        {"a": t[0], "b": torch.zeros(3), "c": t[:, 3]},
    ],
)
def test_targets_that_share_memory_are_refused_and_sources_are_not(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(RefusedError, match="share memory"):
        target(tensors)
    SourceTensors(tensors, 0, None, None, None)


@pytest.mark.parametrize(
    "tensors",
    [
        {"q": t[:, :4], "k": t[:, 4:8], "v": t[:, 8:]},
        {"even": t[::2], "odd": t[1::2]},
        {"real": torch.view_as_real(c := torch.zeros(4, dtype=torch.complex64))[:, 0], "imag": c.imag},
        {"empty": t[:0], "whole": t},
    ],
)
def test_views_between_one_another_are_registered(tensors: dict[str, torch.Tensor]) -> None:
    target(tensors)


def test_one_place_of_a_file_that_is_mapped_twice_is_refused_and_two_places_are_not(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 * mmap.PAGESIZE))
    with path.open("r+b") as file:
        whole, again = (mmap.mmap(file.fileno(), 4 * mmap.PAGESIZE) for _ in range(2))
        later = mmap.mmap(file.fileno(), mmap.PAGESIZE, offset=2 * mmap.PAGESIZE)
        mine = mmap.mmap(file.fileno(), 4 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)
    first = torch.frombuffer(whole, dtype=torch.float32, count=8)
    for other in (
        torch.frombuffer(again, dtype=torch.float32, count=8),
        torch.frombuffer(again, dtype=torch.int16, count=4, offset=28),
    ):
        with pytest.raises(RefusedError, match=r"^a and b lie in one place of a file that is mapped twice"):
            TargetTensors({"a": first, "b": other}, 0, None, None, None)
    with pytest.raises(RefusedError, match="mapped twice"):
        third = torch.frombuffer(whole, dtype=torch.float32, count=8, offset=2 * mmap.PAGESIZE)
        TargetTensors({"a": third, "b": torch.frombuffer(later, dtype=torch.float32, count=1)}, 0, None, None, None)
    apart = {
        "a": first,
        "b": torch.frombuffer(again, dtype=torch.float32, count=8, offset=32),
        "c": torch.frombuffer(later, dtype=torch.float32, count=8),
        "d": torch.frombuffer(mine, dtype=torch.float32, count=8),
    }
    TargetTensors(apart, 0, None, None, None)


def test_one_memory_may_be_one_weight_under_two_names() -> None:
    w = torch.zeros(4)
    assert target({"a": w, "b": w}, described(a=((4,), {"resolved_name": "w"}), b=((4,), {"resolved_name": "w"}))).names
    for tie in ({"a": {"aliases": ("b",)}, "b": {}}, {"a": {}, "b": {"aliases": ("a",)}}):
        both = {"a": w, "b": w}
        found = target(both, described(a=((4,), tie["a"]), b=((4,), tie["b"])))
        assert [(m.name, m.aliases) for m in found.wire] == [("a", ("b",))]  # one tensor feeds it
        found.check_unmoved()
        both["b"] = torch.zeros(4)
        with pytest.raises(RefitdError, match="b: it is no longer the memory of a"):
            found.check_unmoved()
    tied = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight  # type: ignore[assignment]
    assert target(tied).names == ["a.weight"]


def test_derived_tensors_lie_apart_from_weights_and_buffers_from_one_another() -> None:
    w = torch.zeros(64)
    made = Derived(w[32:], ("w",), lambda tensor: None)
    with pytest.raises(RefusedError, match="w and made share memory"):
        target({"w": w}, derived={"made": made})
    scratch = torch.zeros(4)
    apart = {"one": Derived(scratch, ("w",), print), "two": Derived(scratch, ("w",), print)}
    target({"w": w}, derived=apart)
    buffer = MXFP8Buffer.empty((4, 64))
    with pytest.raises(RefusedError, match="share memory"):
        target({"w": buffer, "v": buffer.scale.view(torch.uint8)})


def test_two_registrations_lie_apart() -> None:
    one, other = target({"a": t[:4], "x": torch.zeros(2)}), target({"b": t[4:]})
    one.written.check_apart(other.written, "policy/a:0")
    with pytest.raises(RefusedError, match="a: it shares memory with a of policy/a:0"):
        one.written.check_apart(target({"a": t[:4]}).written, "policy/a:0")  # the same weight in the same place
    with pytest.raises(RefusedError, match="b: it shares memory with a"):
        one.written.check_apart(target({"b": t[:4]}).written, "policy/a:0")
    with pytest.raises(RefusedError, match="b: it shares memory with a of policy/a:0"):
        one.written.check_apart(target({"b": t[3:]}).written, "policy/a:0")


def test_two_registrations_do_not_meet_in_a_file_that_is_mapped_twice(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(2 * mmap.PAGESIZE))
    with path.open("r+b") as file:
        whole, again = (mmap.mmap(file.fileno(), 2 * mmap.PAGESIZE) for _ in range(2))
        mine = mmap.mmap(file.fileno(), 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)

    def rows(mapped: mmap.mmap, offset: int = 0) -> torch.Tensor:
        return torch.frombuffer(mapped, dtype=torch.float32, count=8, offset=offset)

    one = target({"a": rows(whole)})
    with pytest.raises(RefusedError, match="a: it shares memory with a of policy/a:0"):
        one.written.check_apart(target({"a": rows(whole)}).written, "policy/a:0")
    one.written.check_apart(target({"b": rows(again, 32)}).written, "policy/a:0")
    one.written.check_apart(target({"b": rows(mine)}).written, "policy/a:0")
    with pytest.raises(RefusedError, match="b: it lies, by another mapping of a file, in one place with a of policy/a"):
        one.written.check_apart(target({"b": rows(again, 28)}).written, "policy/a:0")


def test_derived_tensors_of_one_registration_lie_apart_from_those_of_another() -> None:
    made, w = torch.zeros(8), torch.zeros(4)
    derived = {"made": Derived(made, ("w",), print)}
    one = target({"w": w}, derived=derived)
    for other in (
        target({"v": torch.zeros(2)}, derived={"made": Derived(made, ("v",), print)}),
        target({"v": made[6:]}),
        target({"v": torch.zeros(2)}, derived={"other": Derived(made[:2], ("v",), print)}),
    ):
        with pytest.raises(RefusedError, match=r"(v|other|made): it shares memory with made of policy/a:0"):
            one.written.check_apart(other.written, "policy/a:0")
    with pytest.raises(RefusedError, match="made: it shares memory with v of policy/b:0"):
        target({"v": made[6:]}).written.check_apart(one.written, "policy/b:0")


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [draw(st.integers(0, 7)) for _ in shape]
    return torch.zeros(256, dtype=torch.int16).as_strided(shape, strides, draw(st.integers(0, 40)))


def places(tensor: torch.Tensor) -> list[int]:
    found = torch.arange(256).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return found.reshape(-1).tolist()


@settings(max_examples=300, deadline=None)
@given(st.lists(views(), min_size=1, max_size=4))
def test_shared_places_are_found_as_by_trying_all(tensors: list[torch.Tensor]) -> None:
    memory = torch.zeros(256, dtype=torch.int16)
    laid = [memory.as_strided(v.shape, v.stride(), v.storage_offset()) for v in tensors]
    for view in laid:
        assert overlaps_itself(view) == (len(set(places(view))) < view.numel())
    # several elements in one place are refused before
    laid = [view for view in laid if not overlaps_itself(view)]
    pairs = {
        (i, j) for i in range(len(laid)) for j in range(i + 1, len(laid)) if {*places(laid[i])} & {*places(laid[j])}
    }
    assert set(overlapping(laid, extents(laid))) == pairs
    for i in range(len(laid)):
        for j in range(i + 1, len(laid)):
            assert met(extents([laid[i]]), extents([laid[j]])) or (i, j) not in pairs


def test_two_pieces_of_a_tied_weight_in_one_memory_are_refused_and_one_piece_is_not() -> None:
    memory = torch.zeros(4, 1)

    def piece(name: str, other: str, first: int) -> ParameterMetadata:
        tile = Tile(name, (first, 0), (4, 1), 0, (1, 1))
        return ParameterMetadata(name, (4, 1), torch.float32, 4, tiles=(tile,), global_shape=(8, 1), aliases=(other,))

    with pytest.raises(RefusedError, match="a and b share memory"):
        target({"a": memory, "b": memory}, [piece("a", "b", 0), piece("b", "a", 4)])
    assert target({"a": memory, "b": memory}, [piece("a", "b", 4), piece("b", "a", 4)]).names == ["a"]
    plain = [replace(piece(name, "", first), aliases=()) for name, first in (("a", 0), ("b", 4))]
    assert [m.aliases for m in SourceTensors({"a": memory, "b": memory}, 0, plain, None, None).metadata] == [(), ()]
