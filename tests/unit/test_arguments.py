"""An invalid argument raises a RefitdError that names it; convertible values are converted; the session stays open."""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np
import pytest
import torch

from refitd import ParameterMetadata, PlanError, RefitdError, RefusedError, Tile
from refitd.client.arenas import number_of
from refitd.client.calls import encoded, flag, seconds, text, whole
from refitd.client.given import checked_wanted
from refitd.client.source_tensors import MXFP8Offer, SourceTensors
from refitd.client.target_tensors import Derived, TargetTensors
from refitd.describe.metadata import plain
from refitd.describe.module import describe_module
from refitd.protocol import local
from refitd.protocol.base import MAX_MESSAGE_BYTES, Decoder
from refitd.protocol.shards import Shard, metadata_of, shard_of
from refitd.text import mismatch


class Rank(enum.IntEnum):
    ONE = 1


class Name(enum.StrEnum):
    POLICY = "policy"


@pytest.mark.parametrize("one", [1, np.int64(1), np.uint8(1), torch.tensor(1), np.array(1), Rank.ONE])
def test_whole_numbers_of_all_kinds_are_ints(one: Any) -> None:
    assert (found := whole("rank", one)) == 1 and type(found) is int


@pytest.mark.parametrize(
    "wrong", [None, "1", 1.0, True, torch.tensor(1.0), torch.tensor([1, 2]), -1, 1 << 63, math.inf, []]
)
def test_what_is_no_whole_number_is_refused(wrong: Any) -> None:
    with pytest.raises(RefusedError, match="rank is"):
        whole("rank", wrong)


@pytest.mark.parametrize("wrong", [None, "1", math.inf, -math.inf, math.nan, -1, 1e12, torch.zeros(2), object()])
def test_what_is_no_time_is_refused(wrong: Any) -> None:
    with pytest.raises(RefusedError, match="timeout is"):
        seconds("timeout", wrong)
    assert type(seconds("timeout", np.float32(2))) is float and seconds("timeout", torch.tensor(2)) == 2.0


def test_texts_and_truths() -> None:
    assert type(text("model", Name.POLICY)) is str and text("model", np.str_("m")) == "m"
    for wrong in (None, "", 3, b"m", "x" * 513, "\ud800", ["m"]):
        with pytest.raises(RefusedError, match="model "):
            text("model", wrong)
    assert flag("queue", np.bool_(True)) is True and flag("queue", torch.tensor(False)) is False
    for wrong in (None, "yes", 2, np.zeros(2, bool)):
        with pytest.raises(RefusedError, match="queue is"):
            flag("queue", wrong)


def test_descriptions_of_all_kinds_of_numbers_are_those_of_ints() -> None:
    def described(number: Any, truth: Any, tensor_dtype: Any, real: Any) -> ParameterMetadata:
        return ParameterMetadata(
            name="w",
            shape=(number(4), number(6)),
            dtype=torch.float32,
            element_size=number(4),
            is_tp=truth(True),
            partition_dim=number(0),
            partition_sizes=[number(2), number(2)],
            owner_rank=number(1),
            tensor_parallel_group_ranks=[number(0), number(1)],
            tiles=(Tile("w", (number(0), 0), (number(4), 6), number(0), (number(6), 1)),),
            global_shape=(number(8), 6),
            fill=real(0.0),
            cast_from=tensor_dtype,
        )

    expected = described(int, bool, "float16", float)
    assert plain(expected) is expected
    for other in (
        described(np.int64, np.bool_, torch.float16, torch.tensor),
        described(torch.tensor, torch.tensor, "torch.float16", np.float64),
    ):
        found = plain(other)
        assert found == expected and shard_of([other]) == shard_of([expected])
        sent = local.RegisterSource(model="m", rank=1, world_size=2, shard=shard_of([other]))
        decoder: Decoder[local.ClientRequest] = Decoder(local.ClientRequest)
        assert decoder.decode(encoded(1, sent)) == (1, sent)
        assert metadata_of(sent.shard, 1)[0].fill == 0.0


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("shape", (4.0,)),
        ("shape", "4"),
        ("shape", None),
        ("dtype", 3),
        ("is_tp", "no"),
        ("partition_dim", None),
        ("owner_rank", "0"),
        ("tensor_parallel_group_ranks", [0, None]),
        ("fill", "0"),
        ("fill", torch.zeros(2)),
        ("aliases", "output"),
        ("aliases", (None,)),
        ("cast_from", 16),
        ("tiles", ((0, 4),)),
        ("resolved_name", ""),
    ],
)
def test_a_description_that_is_none_is_refused_by_tensor_and_field(field: str, wrong: Any) -> None:
    m = ParameterMetadata(name="w", shape=(4,), dtype=torch.float32, element_size=4)
    setattr(m, field, wrong)
    with pytest.raises(PlanError, match=f"w: {field} is"):
        SourceTensors({"w": torch.zeros(4)}, 0, [m], None, None)


def test_metadata_that_is_none_is_refused() -> None:
    m = ParameterMetadata(name="w", shape=(4,), dtype=torch.float32, element_size=4)
    for wrong in (m, {"w": m}, "w", 3, [None], [{"name": "w"}]):
        with pytest.raises(RefusedError, match="metadata"):
            TargetTensors({"w": torch.zeros(4)}, 0, wrong, None, None)  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="w: metadata describes it twice"):
        TargetTensors({"w": torch.zeros(4)}, 0, [m, m], None, None)
    m.is_tp = True
    with pytest.raises(RefusedError, match="w: is_tp is True, and tensor_parallel_group_ranks"):
        TargetTensors({"w": torch.zeros(4)}, 0, [m], None, None)


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        [("w", (2,))],
        {"w": (2,)},
        {"w": ((2,), "float32")},
        {"w": ((2.0,), torch.float32)},
        {"w": (2, torch.int8)},
        {"w": ((-1,), torch.float32)},
        {"w": ((2,), torch.complex32)},
        {3: ((2,), torch.float32)},
    ],
)
def test_what_cannot_be_allocated_is_refused(wanted: Any) -> None:
    with pytest.raises(RefusedError, match="wanted"):
        checked_wanted(wanted)


def test_what_no_message_may_hold_is_refused_by_whoever_says_it() -> None:
    wrong: list[Any] = [torch.tensor(0.0), np.int64(1), object(), "x", -1, None, 1 << 70, {1}]
    for value in wrong:
        with pytest.raises(RefusedError, match=r"(version|Withdraw): .*correct the argument of that name"):
            encoded(1, local.Withdraw(member="m", version=value))
    with pytest.raises(RefitdError, match="would take"):
        encoded(1, local.LiveChecked(member="m", check=1, digests=bytes(MAX_MESSAGE_BYTES)))
    with pytest.raises(RefusedError):
        encoded(1, local.RegisterSource(model="\ud800", rank=0, world_size=1, shard=Shard(tensors=())))


class Evil:
    def __repr__(self) -> str:
        raise ValueError


class Raising(dict[str, Any]):
    def __iter__(self) -> Any:
        return iter(["w"])

    def keys(self) -> Any:
        return ["w"]

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


def derived_of(wrong: Any) -> TargetTensors:
    made = {"d": Derived(torch.ones(2), sources=wrong, refresh=lambda t: None)}
    return TargetTensors({"w": torch.ones(2)}, 0, None, None, None, derived=made)


@pytest.mark.parametrize("wrong", [None, 3, b"x", torch.tensor(1.0), np.array([1.5, 2]), Evil()])
@pytest.mark.parametrize(
    "use", [MXFP8Offer, derived_of, number_of, lambda wrong: checked_wanted({"w": (wrong, torch.float32)})]
)
def test_whatever_is_given_wrongly_is_refused_by_what_it_is(use: Any, wrong: Any) -> None:
    if use is number_of and type(wrong) is int:
        wrong = 2**70
    with pytest.raises(RefusedError):
        use(wrong)


def test_what_cannot_be_read_shown_or_iterated_over_is_refused() -> None:
    with pytest.raises(RefusedError, match="this Raising raised KeyError"):
        SourceTensors(Raising(), 0, None, None, None)
    with pytest.raises(RefusedError, match="metadata is"):
        SourceTensors({"w": torch.ones(2)}, 0, torch.tensor(1.0), None, None)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"w: dtype is \.\.\. \(Evil\)"):
        plain(ParameterMetadata("w", (2,), Evil(), 4, fill=Evil()))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, {}, "", 1.5, object(), torch.tensor(1), ["x"], Evil()])
@pytest.mark.parametrize("group", ["tp", "dp", "pp"])
def test_a_group_that_is_none_is_refused_by_its_name(group: str, wrong: Any) -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    module.weight.tensor_model_parallel = True  # type: ignore[assignment]
    with pytest.raises(PlanError, match=f"group {group} is"):
        describe_module(module, 0, {"tp": [0, 1], group: wrong})
    for ranks in (np.array([0, 1]), torch.tensor([0, 1]), (0, 1), range(2)):
        (said,) = describe_module(module, 0, {"tp": ranks})
        assert said.tensor_parallel_group_ranks == [0, 1]


@pytest.mark.parametrize("wrong", [None, [], 1.5, "x", math.nan, np.array([1, 2]), Evil()])
@pytest.mark.parametrize("attribute", ["partition_dim", "partition_stride", "partition_sizes", "tensor_model_parallel"])
def test_an_attribute_that_is_none_is_refused_by_its_name(attribute: str, wrong: Any) -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    module.weight.tensor_model_parallel = True  # type: ignore[assignment]
    setattr(module.weight, attribute, wrong)
    if attribute == "tensor_model_parallel" and not isinstance(wrong, np.ndarray):
        return  # it is true or false
    if attribute == "partition_sizes" and wrong is None:
        return
    with pytest.raises(PlanError, match=attribute):
        describe_module(module, 0, {"tp": [0, 1]})


@pytest.mark.parametrize("wrong", [None, "x", 1.5, np.array([1, 2])])
def test_a_stride_of_an_fc1_that_is_none_is_refused_by_its_name(wrong: Any) -> None:
    module = torch.nn.Module()
    module.linear_fc1 = torch.nn.Linear(4, 4, bias=False)
    module.linear_fc1.weight.tensor_model_parallel = True  # type: ignore[assignment]
    module.linear_fc1.weight.partition_stride = wrong
    with pytest.raises(PlanError, match="partition_stride"):
        describe_module(module, 0, {"tp": [0, 1]})


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Expected `int`, got `str` - at `$.node.workers`", ("node.workers", "expected a whole number, found a text")),
        ("Expected `int` >= 1 - at `$.a[...]`", ("a[...]", "expected a whole number >= 1")),
        ("Expected `str | null`, got `object`", ("", "expected a text or nothing, found a table")),
        ("Object contains unknown field `x` - at `$.m`", ("m", "unknown key `x`")),
        ("Object missing required field `x`", ("", "missing key `x`")),
        ("Invalid enum value 'x' - at `$.m`", ("m", "unknown choice 'x'")),
    ],
)
def test_mismatches_are_told_in_words(said: str, words: tuple[str, str]) -> None:
    assert mismatch(said) == words
