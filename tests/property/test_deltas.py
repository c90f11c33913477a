"""For any difference, a base and the delta make the message; a delta that does not fit is refused."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.testing import assert_array_equal

from refitd.copy_services.deltas import NOTE_BYTES, WORDS, Comparison, Delta, Encoding, Note, apply
from refitd.errors import TransportError


def delta_of(new: np.ndarray, base: np.ndarray, width: int, step: int = 1 << 30) -> Delta | None:
    """Compare two messages in steps of so many bytes; None if a delta is not worth it."""
    comparison = Comparison(len(new), width)
    for at in range(0, len(new), step):
        if not comparison.add(new[at : at + step], base[at : at + step], at):
            return None
    return comparison.delta()


@st.composite
def messages(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """A message, its base, and the bytes of a word; few or many of the words differ, close together or far apart."""
    width = draw(st.sampled_from(sorted(WORDS)))
    words = draw(st.integers(1, 5000) | st.integers(60_000, 200_000))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    base = random.integers(0, 256, words * width, np.uint8)
    new = base.copy()
    starts = random.integers(0, words, draw(st.integers(0, 40)))
    length = draw(st.integers(1, 30))
    for start in starts.tolist():
        new.view(WORDS[width])[start : start + length] ^= WORDS[width](draw(st.sampled_from([1, 255])))
    return new, base, width


@settings(max_examples=150, deadline=None)
@given(messages(), st.sampled_from([64, 4096, 1 << 30]))
def test_base_and_delta_make_the_message(case: tuple[np.ndarray, np.ndarray, int], step: int) -> None:
    new, base, width = case
    delta = delta_of(new, base, width, step)
    differing = np.flatnonzero(new.view(WORDS[width]) != base.view(WORDS[width]))
    if delta is None:
        assert len(differing) > len(new) // width // 32, "few have changed"
        return
    assert delta.note.changed == len(differing)
    assert len(delta.body) == delta.note.nbytes < max(1, len(new))
    note = Note.from_bytes(delta.note.to_bytes(), len(new), width)
    assert note == delta.note
    found = base.copy()
    apply(note, delta.body, found, width)
    assert_array_equal(found, new)


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.1])
def test_a_delta_is_about_as_short_as_it_can_be(share: float) -> None:
    random = np.random.default_rng(1)
    base = random.integers(0, 256, 8 << 20, np.uint8)
    new = base.copy()
    new.view(np.uint16)[random.random(4 << 20) < share] ^= np.uint16(3)
    delta = delta_of(new, base, 2, 256 << 10)
    assert delta is not None
    assert delta.note.nbytes <= {0.0001: 4.01, 0.001: 4.01, 0.01: 3.1, 0.1: 3.0}[share] * delta.note.changed


def test_what_changed_everywhere_is_given_up_early() -> None:
    base = np.zeros(8 << 20, np.uint8)
    comparison = Comparison(len(base), 2)
    step = 256 << 10
    tried = [comparison.add(np.ones(step, np.uint8), base[at : at + step], at) for at in (0, step)]
    assert tried == [True, False]


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=NOTE_BYTES, max_size=NOTE_BYTES), st.sampled_from([16, 1 << 10, 8 << 20]), st.data())
def test_an_accepted_note_is_of_a_message_no_longer_than_whole(said: bytes, nbytes: int, data: st.DataObject) -> None:
    if data.draw(st.booleans()):  # near what is right
        form, changed = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 20))
        said = Note(form, changed, data.draw(st.integers(-1, 70) | st.just(nbytes))).to_bytes()  # type: ignore[arg-type]
    try:
        note = Note.from_bytes(said, nbytes, 2)
    except TransportError as exc:
        assert "cannot come in form" in str(exc)
        return
    assert 0 <= note.nbytes <= nbytes and 2 * note.changed <= nbytes
    assert (note.form is Encoding.WHOLE) == (note.nbytes == nbytes)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 60), st.binary(max_size=400), st.sampled_from(list(Encoding)))
def test_a_delta_that_leaves_its_message_writes_nothing(width: int, words: int, body: bytes, form: Encoding) -> None:
    """Arbitrary bytes are either a valid delta of this message, or leave the message unchanged."""
    message = np.arange(words * width, dtype=np.uint8)
    before, data = message.copy(), np.frombuffer(body, np.uint8)
    for changed in (0, 1, len(body) // (width + 1)):
        try:
            note = Note.from_bytes(Note(form, changed, len(body)).to_bytes(), len(message), width)
        except TransportError:
            continue
        if note.form is Encoding.WHOLE:
            continue
        try:
            apply(note, data, message, width)
        except TransportError as exc:
            assert "positions" in str(exc)
            assert_array_equal(message, before)
        else:
            differing = message.view(WORDS[width]) != before.view(WORDS[width])
            assert np.count_nonzero(differing) <= changed
            before = message.copy()
