"""Two peers (here: two threads) exchange deltas over gloo or NIXL; every corruption is detected."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from numpy.testing import assert_array_equal

from refitd.copy_services import DIRECT, DigestMismatch
from refitd.copy_services.deltas import Encoding, Note, Pace
from refitd.copy_services.pieces import ArenaPiece, Base
from refitd.copy_services.streams import InFlight, Stream
from refitd.copy_services.windows import WindowExchange, _doing
from refitd.dtypes import DESTINATION_SIZES, cast_number
from refitd.errors import TransportError
from refitd.mxfp8.parts import Converter
from tests.support.service_threads import SERVICES, TIMEOUT_S, ServiceThreads

Words = np.ndarray
MESSAGE_BYTES = 64 << 10
FLOAT32_TO_BFLOAT16 = 1
BLOCKS_TO_MXFP8 = cast_number("bfloat16[32]", "fp8.rceil.data") or 0


class Ends(ServiceThreads):
    """A sender, which may inherit from another class first, and a receiver."""

    def __init__(self, service: str, sender: type[WindowExchange] | None = None) -> None:
        super().__init__(service, ("sender", "receiver"), MESSAGE_BYTES, {} if sender is None else {0: sender})

    def exchange(
        self, sent: list[ArenaPiece], received: list[ArenaPiece], *, verify: bool = True, first_s: float | None = None
    ) -> list[Any]:
        """Return each end's result, or its error; the sender's timeout is `first_s`, if it has its own."""
        for number, (give, take) in enumerate(zip(sent, received, strict=True)):
            self.services[0].send(number, give, 1)
            self.services[1].receive(number, take, 0)
        return self.run(first_s=first_s, verify=verify)


@pytest.fixture(scope="module", params=SERVICES)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    found = Ends(request.param)
    yield found
    found.close()


def based(words: Words, base: Words, cast: int = 0, version: str = "v1") -> ArenaPiece:
    """Return a piece whose earlier version is `base`."""
    element = DESTINATION_SIZES[cast] or words.itemsize
    piece = ArenaPiece(words, cast, element)
    piece.base = Base(piece if base is words else ArenaPiece(base, cast, element), version)
    return piece


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Words, Words, int, bool]:
    """Draw the new words, the base words, their conversion, and whether they are stored by columns."""
    cast = draw(st.sampled_from([0, 0, FLOAT32_TO_BFLOAT16, BLOCKS_TO_MXFP8]))
    kind = {FLOAT32_TO_BFLOAT16: np.uint32, BLOCKS_TO_MXFP8: "V64"}.get(cast) or draw(
        st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64, np.complex128])
    )
    shape = draw(st.sampled_from([(1,), (37,), (40, 30), (131, 257), (3, 30_000), (1, 5, 7)]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    before = random.integers(0, 256, int(np.prod(shape)) * np.dtype(kind).itemsize, np.uint8).view(kind).reshape(shape)
    new, share = before.copy(), draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))
    flat = new.reshape(-1).view(np.uint8).reshape(new.size, -1)
    flat[random.random(new.size) < share, -1] ^= 1
    return new, before, cast, draw(st.booleans())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(boxes(), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_what_arrives_is_what_was_sent(
    ends: Ends, cases: list[tuple[Words, Words, int, bool]], beside: bool, all_based: bool
) -> None:
    """Write over the base or `beside` it (as with exchanged arenas); contiguous or not, converted or not."""
    sent, received, wanted, places = [], [], [], []
    for number, (new, before, cast, in_columns) in enumerate(cases):
        want, held = (Converter()(cast, words) if cast else words for words in (new, before))
        if in_columns:
            held = np.asfortranarray(held)
        held = held.copy(order="K")
        place = np.zeros_like(held) if beside else held
        give, take = based(new, before, cast), based(place, held)
        if not all_based and number % 2:
            give.base = take.base = None
        sent, received = [*sent, give], [*received, take]
        wanted, places = [*wanted, want], [*places, place]
    given_, taken = ends.exchange(sent, received)
    assert not isinstance(taken, Exception), taken
    assert not isinstance(given_, Exception), given_
    for want, place in zip(wanted, places, strict=True):
        assert place.tobytes() == want.tobytes()
    whole = sum(want.nbytes for want in wanted)
    assert taken.received_bytes == whole
    assert taken.changed_bytes <= taken.delta_bytes <= whole
    assert taken.crossed_bytes <= whole + 400 + 16 * (whole // 1000)


def test_little_crosses_where_little_has_changed(ends: Ends) -> None:
    before = np.arange(2_000_000, dtype=np.uint16)
    new, live = before.copy(), before.copy()
    new[::100] ^= 7
    _, taken = ends.exchange([based(new, before)], [based(live, live)])
    assert_array_equal(live, new)
    assert (taken.received_bytes, taken.delta_bytes, taken.changed_bytes) == (4_000_000, 4_000_000, 40_000)
    assert taken.crossed_bytes <= 0.016 * 4_000_000


@pytest.mark.parametrize("verify", [True, False])
def test_only_equal_bases_are_used_and_only_where_digests_prove_it(ends: Ends, verify: bool) -> None:
    before = np.zeros(100_000, np.uint16)
    for version in ("v0", "v1"):
        new, live = before + np.uint16(5), before.copy()
        new[7] = 1
        _, taken = ends.exchange([based(new, new.copy())], [based(live, live, version=version)], verify=verify)
        if verify and version == "v1":  # the "v1" of the sender differs from the receiver's
            assert isinstance(taken, DigestMismatch)
            continue
        assert_array_equal(live, new)
        assert taken.delta_bytes == 0


def test_a_base_that_was_changed_is_found_by_who_holds_it(ends: Ends) -> None:
    before = np.arange(300_000, dtype=np.uint16)
    new, held = before.copy(), before.copy()
    new[5], held[70_000] = 1, 2
    place = np.zeros_like(held)
    ends.services[0].send(0, based(new, before), 1)
    ends.services[1].receive(0, based(place, held), 0)
    named: list[int] = []

    def run(rank: int) -> list[int]:
        def on_wrong_base() -> None:
            time.sleep(0.05)  # the other rank waits for this
            named.append(rank)

        with pytest.raises(DigestMismatch):
            ends.services[rank].run(TIMEOUT_S, on_wrong_base=on_wrong_base)
        return list(named)

    with ThreadPoolExecutor(2) as threads:
        known = list(threads.map(run, range(2)))
    assert known == [[1], [1]], "who holds it says so before any rank knows that the run fails"
    assert held[70_000] == 2, "what is held is only read"
    # the ends can still be used, and whole messages need no base
    plain = ArenaPiece(place, 0, 2)
    assert not isinstance(ends.exchange([ArenaPiece(new, 0, 2)], [plain])[1], Exception)
    assert_array_equal(place, new)


class Liar(WindowExchange):
    """A sender that announces each message with `note` and `body`."""

    note = Note(Encoding.GAPS_8, 1, 3)
    body = bytes(3)

    def _line(self, stream: Any, move: Any) -> Any:
        line = super()._line(stream, move)
        liar = type(self)

        def note(number: int) -> bytes:
            line_note(number)
            return liar.note.to_bytes()

        if stream.is_send and stream.has_bases:
            line_note, line._note = line._note, note
            line._length = lambda number: len(liar.body)
            body = torch.frombuffer(bytearray(liar.body or b"-"), dtype=torch.uint8)
            line._post_body = lambda number: line._post(number, body)
        return line


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    ("note", "body", "found"),
    [
        (Note(Encoding.GAPS_8, 1, 300_000), b"", "cannot come in form"),
        (Note(Encoding.GAPS_8, 1000, 30), b"", "cannot come in form"),
        (Note(9, 1, 3), b"", "cannot come in form 9"),  # type: ignore[arg-type]
        (Note(Encoding.GAPS_16, 1, 4), b"ab\xf0\xff", "positions, up to 65520, in a message of 1000 words"),
        (Note(Encoding.GAPS_8, 2, 6), b"abcd\x01\xff", "a delta of 2 words has 1 positions"),
        (Note(Encoding.GAPS_8, 1, 3), b"ab\x01", "read; it came as a delta"),
    ],
)
def test_a_delta_that_cannot_be_is_refused(service: str, note: Note, body: bytes, found: str) -> None:
    ends = Ends(service, type("Told", (Liar,), {"note": note, "body": body}))
    try:
        before = np.arange(1000, dtype=np.uint16)
        live = before.copy()
        _, taken = ends.exchange([based(before + np.uint16(0), before)], [based(live, live)], first_s=1.0)
        assert isinstance(taken, TransportError) and found in str(taken)
    finally:
        ends.close()


def test_what_opens_a_stream_has_no_number_in_errors() -> None:
    stream = Stream(1, DIRECT, False, [], [], [], 0)
    told = [_doing(InFlight(stream, number, None, torch.empty(0), False)) for number in (-1, 0)]
    assert told == ["the opening message from", "message 0 from"]


def test_deltas_that_are_slower_rest_and_are_tried_again() -> None:
    pace = Pace()
    asked = []
    for _ in range(12):
        wants = pace.wants_deltas()
        asked.append(wants)
        pace.took(10.0 if wants else 5.0, 1000, as_deltas=wants)
        pace.whole = pace.whole or 200.0
    assert asked == [True] * 3 + [False] + [True] + [False] * 2 + [True] + [False] * 4
    pace = Pace(whole=200.0)
    for seconds in (5.0, 0.5, 5.59, 0.1):
        pace.took(seconds, 1000, as_deltas=True)
        assert pace.wants_deltas()
