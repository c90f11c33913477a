"""Every kind of commit detects every difference between a target and its registration, and names the tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from refitd import Derived, MXFP8Buffer
from refitd.client.target_tensors import TargetTensors
from refitd.errors import CommitError
from refitd.protocol import local
from tests.support.target_daemon import WAIT_S, Daemon, target_on


def parameter(**attributes: object) -> nn.Parameter:
    found = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


class Holder:
    """A module and a dict that hold one parameter each; `register` takes either."""

    def __init__(self, is_module: bool) -> None:
        self.module = nn.Module()
        self.module.w = parameter()
        self.module.v = parameter()
        self.given: Any = self.module if is_module else {"w": self.module.w, "v": self.module.v}

    def put(self, name: str, value: Any) -> None:
        if isinstance(self.given, dict):
            self.given[name] = value
        else:
            setattr(self.module, name, value)

    @property
    def w(self) -> Any:
        return self.given["w"] if isinstance(self.given, dict) else self.module.w


def rebound(h: Holder) -> None:
    h.w.data = torch.zeros(4, 4)


def exchanged(h: Holder) -> None:
    w, v = h.w, h.given["v"] if isinstance(h.given, dict) else h.module.v
    h.put("w", v)
    h.put("v", w)


CHANGES: dict[str, Callable[[Holder], object]] = {
    "replaced": lambda h: h.put("w", parameter()),
    "rebound": rebound,
    "set to another": lambda h: h.w.set_(torch.zeros(4, 4)),
    "exchanged with another": exchanged,
    "a part of itself": lambda h: setattr(h.w, "data", h.w.data[:2]),
    "grown": lambda h: h.w.resize_(64, 64),
    "shrunk in place": lambda h: h.w.resize_(2, 2),
    "transposed": lambda h: setattr(h.w, "data", h.w.data.t()),
    "of another shape": lambda h: setattr(h.w, "data", h.w.data.view(2, 8)),
    "of another type": lambda h: setattr(h.w, "data", h.w.data.view(torch.int32)),
    "freed": lambda h: h.w.untyped_storage().resize_(0),
    "freed and taken again, larger": lambda h: [h.w.untyped_storage().resize_(n) for n in (0, 1 << 20)],
    "cut otherwise": lambda h: [
        setattr(h.w, k, v) for k, v in (("tensor_model_parallel", True), ("partition_dim", 0), ("partition_stride", 2))
    ],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_module", [True, False])
def test_a_tensor_that_has_changed_is_found_by_name(change: str, is_module: bool) -> None:
    if change == "cut otherwise" and not is_module:
        pytest.skip("a dict's tensors are whole, whatever they say")
    holder = Holder(is_module)
    tensors = TargetTensors(holder.given, 0, None, {"tp": [0]}, None)
    tensors.check_unmoved(is_described=True)
    with torch.no_grad():
        CHANGES[change](holder)
    with pytest.raises(CommitError, match=r"^[wv]: "):
        tensors.check_unmoved(is_described=True)


@pytest.mark.parametrize(
    "wrong", [None, 3, MXFP8Buffer(torch.zeros(4, 4), torch.zeros(4, 1)), nn.Linear(2, 2), [torch.zeros(4, 4)]]
)
def test_what_is_no_tensor_any_more_is_found_by_name(wrong: Any) -> None:
    tensors = TargetTensors(given := {"w": torch.zeros(4, 4)}, 0, None, None, None)
    given["w"] = wrong
    with pytest.raises(CommitError, match=r"^w: "):
        tensors.check_unmoved(is_described=True)


def test_names_that_come_or_go_are_found() -> None:
    for change in (lambda d: d.pop("v"), lambda d: d.update(x=torch.zeros(1))):
        given = {"w": torch.zeros(4), "v": torch.zeros(4)}
        tensors = TargetTensors(given, 0, None, None, None)
        change(given)
        with pytest.raises(CommitError, match=r"the dict's tensors are not those registered \(changed: \['[vx]'\]\)"):
            tensors.check_unmoved(is_described=True)


def test_the_same_memory_under_a_new_name_of_python_is_no_change() -> None:
    given = {"w": torch.zeros(4, 4)}
    tensors = TargetTensors(given, 0, None, None, None)
    given["w"] = nn.Parameter(given["w"], requires_grad=False)
    tensors.check_unmoved(is_described=True)
    module = nn.Module()
    module.w = parameter(tensor_model_parallel=True, partition_dim=0, partition_stride=2)
    tensors = TargetTensors(module, 0, None, {"tp": [0]}, None)
    module.w = nn.Parameter(module.w.data)
    tensors.check_unmoved(is_described=True)


def test_names_in_another_order_are_no_change_and_do_not_hide_one() -> None:
    given = {"w": torch.zeros(4), "v": torch.zeros(4)}
    tensors = TargetTensors(given, 0, None, None, None)
    given["w"] = given.pop("w")
    tensors.check_unmoved(is_described=True)
    given["w"] = torch.zeros(4)
    with pytest.raises(CommitError, match=r"^w: "):
        tensors.check_unmoved(is_described=True)


def test_buffers_in_mxfp8_and_derived_tensors_are_found_by_name() -> None:
    def buffer() -> MXFP8Buffer:
        return MXFP8Buffer(torch.zeros(32, 32, dtype=torch.float8_e4m3fn), torch.zeros(32, 1, dtype=torch.uint8))

    for field in ("data", "scale"):
        given: dict[str, Any] = {"w": buffer()}
        tensors = TargetTensors(given, 0, None, None, None)
        tensors.check_unmoved(is_described=True)
        given["w"] = replace(given["w"], **{field: getattr(given["w"], field).clone()})
        with pytest.raises(CommitError, match=rf"^w\.{field}: "):
            tensors.check_unmoved(is_described=True)
        given["w"] = torch.zeros(32, 32)
        with pytest.raises(CommitError, match=r"^w"):
            tensors.check_unmoved(is_described=True)
    made = Derived(torch.zeros(4), ("w",), lambda tensor: None)
    tensors = TargetTensors({"w": torch.zeros(4)}, 0, None, None, None, derived={"d": made})
    made.tensor.data = torch.zeros(4)
    with pytest.raises(CommitError, match=r"^d: "):
        tensors.check_unmoved(is_described=True)


WAYS = ("poll", "wait")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["copied", "in place"])
def test_every_way_to_commit_looks(way: str, where: str) -> None:
    daemon, given = Daemon(), {"w": torch.zeros(4)}
    tensors = TargetTensors(given, 0, None, None, None)
    target = target_on(daemon, tensors)
    given["w"].data = torch.ones(4)
    daemon.hears(local.PrepareCommit(swap="s", member="m", version=1, in_place=where == "in place"))
    with pytest.raises(CommitError, match=r"^version 1 could not be taken over: w: |^w: "):
        target.poll() if way == "poll" else target.wait(1, timeout=WAIT_S)
    said = daemon.next()
    assert isinstance(said, local.CommitFailed) and said.reason.startswith("w: its storage has changed")
    assert target.version is None and bool((given["w"] == 1).all())
    target.release()


def test_a_dtensor_that_is_laid_out_otherwise_is_found_by_name(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        held = torch.zeros(4, 4)

        def dtensor(placement: Any) -> DTensor:
            return DTensor.from_local(held, mesh, [placement], run_check=False)

        tensors = TargetTensors(given := {"w": dtensor(Shard(0))}, 0, None, None, None)
        given["w"] = dtensor(Shard(0))
        tensors.check_unmoved(is_described=True)
        given["w"] = dtensor(Replicate())
        with pytest.raises(CommitError, match=r"^w: it is laid out otherwise"):
            tensors.check_unmoved(is_described=True)
    finally:
        dist.destroy_process_group()
