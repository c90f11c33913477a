"""Frames become typed messages or clear refusals, never anything else."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import zlib

import msgpack
import msgspec
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from refitd import ParameterMetadata
from refitd.describe.metadata import Repeat, Tile
from refitd.errors import ProtocolError
from refitd.protocol import base, local, shards
from refitd.protocol.base import (
    PROTOCOL_VERSION,
    Decoder,
    Message,
    UnknownKind,
    check_version,
    digest_of,
    encode,
    pack,
    request_of,
    unpack,
)
from tests.fuzz.values import value_of
from tests.recorded import kinds
from tests.support.other_minor.minors import newer, older

DECODER: Decoder[local.ClientRequest] = Decoder(local.ClientRequest)


def test_a_message_comes_back_as_it_was() -> None:
    message = local.StartSwap(model="policy", version=3, timeout_s=2.5)
    assert DECODER.decode(encode(7, message)) == (7, message)


def test_metadata_survives_the_wire() -> None:
    metadata = [
        ParameterMetadata(
            name="w",
            shape=(4, 8),
            dtype="bfloat16",
            element_size=2,
            is_tp=True,
            partition_dim=1,
            partition_stride=2,
            tensor_parallel_group_ranks=[0, 1],
            resolved_name="layers.3.w",
            owner_rank=1,
            tiles=(Tile("w", (0, 0), (4, 8), 0, (8, 1), Repeat(0, 2, 4, 4)),),
            global_shape=(8, 8),
        ),
        ParameterMetadata("n", (), "float32", 4, partition_sizes=[1, 2], owner_rank=1),
    ]
    shard = shards.shard_of(metadata)
    message = local.RegisterSource(model="m", rank=1, world_size=2, shard=shard)
    (_, decoded) = DECODER.decode(encode(1, message))
    assert isinstance(decoded, local.RegisterSource)
    assert shards.metadata_of(decoded.shard, owner_rank=1) == metadata


def test_group_ranks_move_up_by_the_offset() -> None:
    metadata = [ParameterMetadata("w", (1,), "float32", 4, tensor_parallel_group_ranks=[0, 1])]
    moved = shards.metadata_of(shards.shard_of(metadata), owner_rank=4)
    assert moved[0].tensor_parallel_group_ranks == [4, 5]


@pytest.mark.parametrize(
    ("envelope", "why"),
    [
        ([1], "an array"),
        ([-1, {"type": "GetStatus"}], "request id"),
        ([True, {"type": "GetStatus"}], "request id"),
        ([1 << 63, {"type": "GetStatus"}], "request id"),
        ([1, {}], "type"),
        ([1, {"type": "NodeWelcome", "protocol": 1, "boot": "x"}], "NodeWelcome"),
        ([1, {"type": "Publish", "member": "m", "version": 1.5, "slot": 0}], "version"),
        ([1, {"type": "Publish", "member": "", "version": 1, "slot": 0}], "member"),
        ([1, {"type": "Publish", "member": "m" * 600, "version": 1, "slot": 0}], "member"),
    ],
)
def test_what_the_type_does_not_allow_is_refused(envelope: object, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        DECODER.decode(msgpack.packb(envelope))


def test_of_a_repeated_key_every_reader_takes_the_last_value() -> None:
    first, last = (msgpack.packb("model") + msgpack.packb(value) for value in ("policy", "other"))
    frame = b"\x92\x01\x83" + msgpack.packb("type") + msgpack.packb("GetPlan") + first + last
    assert DECODER.decode(frame) == (1, local.GetPlan("other")) and request_of(frame) == (1, "GetPlan")
    twice = b"\x92\x01\x82" + b"".join(msgpack.packb("type") + msgpack.packb(kind) for kind in ("GetPlan", "GetStatus"))
    with pytest.raises(ProtocolError):
        DECODER.decode(twice)


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read() -> None:
    small: Decoder[local.ClientRequest] = Decoder(local.ClientRequest, max_bytes=10)
    with pytest.raises(ProtocolError, match="limit is 10"):
        small.decode(b"\xff" * 11)


def test_a_claimed_length_allocates_nothing() -> None:
    # array32, map32, bin32, str32 and ext32 that claim 4 GiB in a frame of a few bytes
    for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"):
        with pytest.raises(ProtocolError):
            DECODER.decode(b"\x92\x01" + head + b"\xff\xff\xff\xff")


@given(st.binary(max_size=200))
@example(b"\x92\x00\x81\xa4type\xa2a\xdf")  # a type that is no text
def test_no_bytes_do_more_than_raise_a_protocol_error_where_only_the_kind_is_read(frame: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        request_of(frame)


def test_a_shard_that_describes_a_name_twice_is_refused() -> None:
    tensor = shards.WireTensor(name="w", shape=(1,), dtype="float32")
    with pytest.raises(ProtocolError, match="w: described twice"):
        shards.metadata_of(shards.Shard((tensor, tensor)), 0)


def test_a_group_that_was_not_sent_is_refused() -> None:
    tensor = shards.WireTensor(name="w", shape=(1,), dtype="float32", tp_group=3)
    with pytest.raises(ProtocolError, match="group 3"):
        shards.metadata_of(shards.Shard((tensor,)), 0)


SHARD = shards.Shard((shards.WireTensor(name="w", shape=(8,), dtype="float32"),))


def test_a_packed_value_comes_back_under_its_own_digest_only() -> None:
    packed = pack(SHARD)
    assert unpack(packed, shards.Shard, digest_of(SHARD)) == SHARD
    with pytest.raises(ProtocolError, match="its content is"):
        unpack(packed, shards.Shard, "0" * 32)


def test_a_packed_value_that_would_fill_the_memory_is_refused_while_small() -> None:
    bomb = zlib.compress(b"\x00" * (65 << 20))
    assert len(bomb) < 1 << 17
    with pytest.raises(ProtocolError, match="takes more than"):
        unpack(bomb, shards.Shard, "")


def test_ranks_that_hold_the_same_say_the_same() -> None:
    said = {
        shards.shard_of([ParameterMetadata("w", (4,), "float32", 4, is_tp=True, owner_rank=rank,
                                           tensor_parallel_group_ranks=[base, base + 1])])
        for base in (0, 2, 4)
        for rank in (base,)
    }  # fmt: skip
    assert len(said) == 1
    assert shards.metadata_of(said.pop(), 6)[0].tensor_parallel_group_ranks == [6, 7]


def array(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


def registration(groups: bytes) -> bytes:
    """Return a registration frame whose shard groups are this MessagePack."""
    fields = {"type": "RegisterSource", "model": "m", "rank": 0, "world_size": 1}
    packed = b"".join(msgpack.packb(key) + msgpack.packb(value) for key, value in fields.items())
    shard = b"\x82" + msgpack.packb("tensors") + b"\x90" + msgpack.packb("groups") + groups
    return b"\x92\x01\x85" + packed + msgpack.packb("shard") + shard


HUNGRY = {
    "empty arrays": lambda: b"\x92\x01" + array(62 << 20) + b"\x90" * (62 << 20),
    "empty maps": lambda: b"\x92\x01" + array(62 << 20) + b"\x80" * (62 << 20),
    "empty arrays where arrays belong": lambda: registration(array(40 << 20) + b"\x90" * (40 << 20)),
    "short texts": lambda: b"\x92\x01" + array(20 << 20) + b"\xa2ab" * (20 << 20),
    "between long texts": lambda: (
        b"\x92\x01" + array((1 << 20) * 31) + (b"\x90" * ((1 << 20) - 1) + b"\xda\x01\x00" + b"x" * 256) * 31
    ),
    "arrays that claim a million each": lambda: registration(b"\xdd\x00\x0f\xff\xff" * 900 + b"\x00" * (2 << 20)),
    "arrays in arrays": lambda: registration(b"\x91" * (8 << 20)),
}

LIMITED = """
import resource, sys
from refitd.errors import ProtocolError
from refitd.protocol import local
from refitd.protocol.base import Decoder
decoder, frame = Decoder(local.ClientRequest), sys.stdin.buffer.read()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
try:
    decoder.decode(frame)
    print("accepted")
except ProtocolError:
    print((peak() - before) >> 20)
"""


@pytest.mark.parametrize("kind", HUNGRY)
def test_what_a_frame_would_build_is_refused_before_it_is_built(kind: str) -> None:
    frame = HUNGRY[kind]()
    command = [sys.executable, "-c", LIMITED]
    said = subprocess.run(command, input=frame, capture_output=True, timeout=120, check=True).stdout.decode().strip()
    assert said != "accepted"
    assert int(said) < 64, f"{len(frame) >> 20} MiB took {said} MiB more while they were refused"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=400)
    | st.binary(max_size=400),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=60,
)


@given(VALUES)
def test_values_are_counted_whatever_they_are_and_never_fewer_than_there_are(value: object) -> None:
    # the limit is one value for two bytes, and the filler has enough bytes
    filler = b"x" * (300 + 4 * len(msgpack.packb(value)))
    frame = msgpack.packb([value, filler])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(base, "_UNCOUNTED_BYTES", 0)
        base._check_values(frame)
        patched.setattr(base, "MAX_VALUES", values_in([value, filler]) - 1)
        with pytest.raises(ProtocolError, match="which is the limit"):
            base._check_values(frame)


def values_in(value: object) -> int:
    if isinstance(value, list):
        return 1 + sum(map(values_in, value))
    if isinstance(value, dict):
        return 1 + sum(1 + values_in(inner) for inner in value.values())
    return 1


def test_a_registration_of_a_hundred_thousand_tensors_is_not_too_much() -> None:
    tensors = tuple(
        shards.WireTensor(
            name=f"model.layers.{i}.mlp.experts.linear_fc1.weight",
            shape=(16, 16, 16),
            dtype="bfloat16",
            is_tp=True,
            tp_group=0,
            resolved_name=f"decoder.{i}.x",
            tiles=(shards.WireTile("w", (0, 0, 0), (16, 16, 16), 0, (256, 16, 1)),),
            global_shape=(64, 16, 16),
        )
        for i in range(100_000)
    )
    live = tuple(shards.Place(1, i << 12, (512, 32, 2)) for i in range(100_000))
    message = local.RegisterTarget(
        model="m", replica="r", rank=0, world_size=1, shard=shards.Shard(tensors, ((0, 1),)), live=live
    )
    assert DECODER.decode(encode(1, message)) == (1, message)


# --- other minor versions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_message_of_another_minor_version_is_understood(kind: type[msgspec.Struct]) -> None:
    """A newer message has unknown fields; an older one lacks fields that have defaults."""
    decoder: Decoder[Message] = Decoder(kind)
    about = msgspec.inspect.type_info(kind)
    for seed in range(3):
        message = msgspec.convert(value_of(about, random.Random(seed)), kind)
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        assert msgpack.unpackb(encode(1, message)) == msgpack.unpackb(msgpack.packb([1, plain]))
        for other in (newer, older):
            assert decoder.decode(msgpack.packb([1, other(plain, message)])) == (1, message)


def test_a_packed_value_of_another_minor_version_is_understood() -> None:
    for other in (newer, older):
        raw = msgpack.packb(other(msgspec.to_builtins(SHARD), SHARD))
        assert unpack(zlib.compress(raw), shards.Shard, xxhash.xxh3_128_hexdigest(raw)) == SHARD


def test_a_kind_that_a_newer_minor_version_has_is_told_from_a_message_that_is_wrong() -> None:
    with pytest.raises(UnknownKind, match=r"'Explode' refused: it is not one that protocol 5\.\d+ has here") as caught:
        DECODER.decode(msgpack.packb([7, {"type": "Explode", "model": "m"}]))
    assert caught.value.request_id == 7
    for wrong in ({"type": "GetPlan"}, {}, {"type": 5}):
        with pytest.raises(ProtocolError) as caught_other:
            DECODER.decode(msgpack.packb([7, wrong]))
        assert not isinstance(caught_other.value, UnknownKind)


@pytest.mark.parametrize("unknown", [b"\xa2\xff\xff", b"\x81\x01\xc0", b"\x82\xa1a\xc0\xa1a\xc0", b"\xd4\xff\x00"])
def test_what_an_unknown_field_holds_is_not_read(unknown: bytes) -> None:
    assert DECODER.decode(_with_more(unknown)) == (1, local.GetPlan("m"))


def test_an_unknown_field_that_is_too_deep_is_refused() -> None:
    with pytest.raises(ProtocolError):
        DECODER.decode(_with_more(b"\x91" * 5000 + b"\xc0"))


def _with_more(unknown: bytes) -> bytes:
    body = b"\x83" + msgpack.packb("type") + msgpack.packb("GetPlan") + msgpack.packb("model") + msgpack.packb("m")
    return b"\x92\x01" + body + msgpack.packb("more") + unknown


def test_versions_differ_before_the_point_only() -> None:
    major = PROTOCOL_VERSION // 1000
    for minor in (0, 7, 999):
        check_version(1000 * major + minor, "node n1", "this coordinator")
    for theirs, said in ((1000 * major + 1000, f"{major + 1}\\.0"), (2, "2"), (0, "0"), (1 << 20, "1048\\.576")):
        with pytest.raises(ProtocolError, match=f"node n1 speaks protocol {said}, this coordinator {major}\\."):
            check_version(theirs, "node n1", "this coordinator")
