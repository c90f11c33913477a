"""At the end of a block, exactly the tensors that it registered in modules are in one arena."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from refitd.client.adopt import Adoption
from refitd.client.memory_block import MemoryBlock, Space, check_outside
from refitd.errors import RefusedError
from tests.support.arenas import arena_of

MIB = 1 << 20


class Placement:
    """An arena of `nbytes`, a block that fills it, and the placement that `Client.memory` does at its end."""

    def __init__(self, nbytes: int) -> None:
        self.arena = arena_of(nbytes)
        self.adoption: Adoption | None = None

    @contextmanager
    def filled(self) -> Iterator[None]:
        called = "client.memory('policy')"
        space = Space(self.arena, called)
        block = MemoryBlock(called, space)
        try:
            with block:
                yield
            self.adoption = space.adopt(block.roots(), {})
        except BaseException:
            space.put_back()
            raise

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.arena.offset_of(tensor.data_ptr(), tensor.nbytes) is not None

    @property
    def contents(self) -> dict[str, tuple[int, int]]:
        assert self.adoption is not None
        return self.adoption.contents


class Model(nn.Module):
    """Tied weights, a norm, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.head = nn.Linear(12, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("mean", torch.ones(3, dtype=torch.float64))
        self.register_buffer("none", None)
        self.norm = nn.BatchNorm1d(12)


def disjoint(contents: dict[str, tuple[int, int]]) -> bool:
    spans = sorted({*contents.values()})
    return all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))


def private_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def test_a_model_has_the_values_it_would_have_anyway_and_lies_in_the_arena() -> None:
    torch.manual_seed(7)
    plain = Model()
    torch.manual_seed(7)
    placement = Placement(MIB)
    with placement.filled():
        model = Model()
        assert placement.holds(model.embed.weight) and placement.holds(model.mean), "at once"  # type: ignore[arg-type]
        value = torch.tensor(0.5)
        model.scale = nn.Parameter(value)
        del value
        model.shift = nn.Parameter(torch.tensor(0.5))
        assert placement.holds(model.scale), "as soon as its loader has let go of it"
        del model.scale, model.shift
        before = model.embed.weight.data_ptr()
    assert model.embed.weight.data_ptr() == before and model.head.weight is model.embed.weight
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    assert all(placement.holds(value) for value in model.state_dict().values())
    assert not placement.holds(model.table) and torch.equal(model.table, plain.table)  # type: ignore[arg-type]
    assert placement.contents.keys() == model.state_dict().keys() - {"head.weight"} and disjoint(placement.contents)
    assert not torch.nn.modules.module._global_parameter_registration_hooks
    assert not torch.nn.modules.module._global_buffer_registration_hooks


def test_a_model_is_never_in_memory_twice_and_room_of_what_is_gone_is_used_again() -> None:
    placement, peaks = Placement(64 * MIB), []
    before = private_bytes()
    with placement.filled():
        layers = nn.ModuleList()
        for _ in range(4):
            layers.append(nn.Linear(2048, 2048, bias=False))  # 16 MiB each
            peaks.append(private_bytes() - before)
        layers[1] = nn.Identity()
        layers[2] = nn.Linear(2048, 2048, bias=False)
    assert max(peaks) < 24 * MIB, "no more than one layer"
    assert placement.contents.keys() == {"0.weight", "2.weight", "3.weight"} and disjoint(placement.contents)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "to another type": lambda model: model.to(torch.bfloat16),
    "loaded": lambda model: model.load_state_dict({n: t + 1 for n, t in model.state_dict().items()}),
    "assigned": lambda model: model.load_state_dict({n: t + 1 for n, t in model.state_dict().items()}, assign=True),
    "replaced": lambda model: setattr(model[1], "weight", nn.Parameter(torch.ones(9, 9))),
    "a child replaced": lambda model: model.__setitem__(1, nn.Linear(4, 3)),
    "a parameter removed": lambda model: delattr(model[1], "bias"),
    "views made": lambda model: setattr(model[1], "weight", nn.Parameter(model[0].weight.data[1:])),
    "written": lambda model: model.apply(lambda one: nn.init.ones_(one.weight) if hasattr(one, "weight") else None),
    "materialised": lambda model: model.to("meta").to_empty(device="cpu").requires_grad_(False).apply(zero),
}


def zero(module: nn.Module) -> None:
    for tensor in module.parameters():
        tensor.zero_()


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_inside_lies_in_the_arena_as_it_is_at_the_end(change: str) -> None:
    placement = Placement(MIB)
    with placement.filled():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5), nn.BatchNorm1d(5))
        CHANGES[change](model)
        wanted = copy.deepcopy(model.state_dict())
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert all(placement.holds(value) for value in model.state_dict().values())
    assert placement.contents.keys() == wanted.keys()
    assert change == "views made" or disjoint(placement.contents)


def test_a_loaded_model_is_placed_with_what_the_file_holds(tmp_path: Path) -> None:
    torch.save(Model().state_dict(), tmp_path / "weights")
    placement = Placement(MIB)
    with placement.filled():
        with torch.device("meta"):
            model = Model()
        model.load_state_dict(torch.load(tmp_path / "weights", mmap=True), assign=True)
        model.head.weight = model.embed.weight
    assert all(placement.holds(value) for value in model.state_dict().values())
    assert model.head.weight is model.embed.weight


def test_what_is_in_no_module_any_more_or_in_no_version_leaves_the_arena_with_its_values() -> None:
    placement = Placement(MIB)
    with placement.filled():
        model = Model()
        old, mean = model.norm.weight, model.mean
        model.norm.weight = nn.Parameter(torch.zeros(12))
        model.register_buffer("mean", model.mean, persistent=False)
        nn.Linear(3, 3)
    assert not placement.holds(old) and old.tolist() == [1.0] * 12
    assert model.mean is mean and not placement.holds(mean) and mean.tolist() == [1.0] * 3  # type: ignore[operator, arg-type]
    assert placement.contents.keys() == model.state_dict().keys() - {"head.weight"}


def test_views_that_would_keep_the_memory_are_refused_by_name() -> None:
    placement = Placement(MIB)
    with pytest.raises(RefusedError, match=r"BatchNorm1d\.weight: it is in no module any more"), placement.filled():
        model = Model()
        view = model.norm.weight.data[:2]
        model.norm.weight = nn.Parameter(torch.zeros(12))
    assert view.tolist() == [1.0, 1.0]
    with pytest.raises(RefusedError, match=r"norm\.weight: tensors outside this module \(1"), placement.filled():
        model = Model()
        view = model.norm.weight.data
    assert model.norm.weight.tolist() == [1.0] * 12


def test_too_few_bytes_are_refused_by_name_with_what_is_needed_and_all_has_memory_of_its_own() -> None:
    placement = Placement(4096)
    said = r"memory\('policy'\): 2\.weight, 3\.weight found no room in nbytes=4096; 6144 are needed"
    with pytest.raises(RefusedError, match=said), placement.filled():
        model = nn.Sequential(*(nn.Linear(18, 18, bias=False) for _ in range(4)))
    assert not any(placement.holds(param) for param in model.parameters())
    assert all(p.untyped_storage().resizable() and p.isfinite().all() for p in model.parameters())
    with (
        pytest.raises(RefusedError, match=r"1\.weight found no room.*; 6656 are needed"),
        placement.filled(),
    ):
        pair = nn.Sequential(nn.Linear(18, 18, bias=False), nn.Linear(18, 18, bias=False))  # in the middle
        pair[0], pair[1] = pair[1], nn.Linear(32, 20, bias=False)
    with pytest.raises(ZeroDivisionError), placement.filled():
        model = nn.Linear(3, 3)
        model.scale = 1 / 0
    assert not placement.holds(model.weight)
    assert not torch.nn.modules.module._global_module_registration_hooks


def test_the_model_at_the_end_must_fit_and_more_may_exist_meanwhile() -> None:
    placement = Placement(8192)
    with placement.filled():
        model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32, bias=False))  # 8192 bytes each
        model[1].weight = model[0].weight
    assert placement.contents == {"0.weight": (0, 8192)}
    with placement.filled():
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4))).to(torch.bfloat16)  # 4096 bytes each
    assert all(placement.holds(param) for param in model.parameters()) and disjoint(placement.contents)


def test_another_thread_is_left_alone_and_a_second_block_in_one_thread_is_refused() -> None:
    placement, others = Placement(MIB), []
    with placement.filled():
        thread = threading.Thread(target=lambda: others.append((nn.Linear(2, 2), check_outside("build()"))))
        thread.start()
        thread.join()
        model = nn.Linear(3, 3)
        with pytest.raises(RefusedError, match=r"build\(\) inside client\.memory\('policy'\)"):
            check_outside("build()")
    check_outside("build()")
    assert placement.holds(model.weight) and not placement.holds(others[0][0].weight)


def test_a_block_that_builds_nothing_or_keeps_nothing_is_refused() -> None:
    placement = Placement(MIB)
    for build in (lambda: None, lambda: nn.Linear(3, 3)):
        with pytest.raises(RefusedError, match="nothing has been registered"), placement.filled():
            build()
    with pytest.raises(RefusedError, match="nothing to place"), placement.filled():
        model = nn.Sequential(nn.ReLU())
    assert len(model) == 1
