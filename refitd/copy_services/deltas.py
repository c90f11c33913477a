"""Deltas of messages: how they are encoded, and whether they pay off. With numpy alone.

A message is an array of words of 1, 2, 4 or 8 bytes. Its delta is the shortest of these:

    UNCHANGED   empty
    GAPS_8      the changed words, then the gap before each of them in one byte
    GAPS_16     the changed words, then the gap before each of them in two bytes

A longer gap takes several codes: the largest code means "so many unchanged words, and no changed word after them".

    words 3 and 300 of 400 changed (gaps 3, 296), GAPS_8   ->   words 3 and 300, then 3, 255, 41

A bit for each word would be shorter if more than one word in eight has changed, but then no delta is made.

A receiver checks a delta before it applies it. A digest of the whole message proves the result.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from refitd.errors import TransportError

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

WORDS: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# A comparison stops once more words have changed than one in MOST_CHANGED of the compared ones, and one in SLACK of
# all: finding and coding them then takes longer than sending the whole message over a fast cable.
MOST_CHANGED = 8
SLACK = 32

_NOTE = struct.Struct("<BxxxIq")  # form, changed words, bytes of the body
NOTE_BYTES = _NOTE.size


class Encoding(enum.IntEnum):
    """How a message travels."""

    WHOLE = 0
    UNCHANGED = 1
    GAPS_8 = 2
    GAPS_16 = 3


_CODES: dict[Encoding, type[np.generic]] = {Encoding.GAPS_8: np.uint8, Encoding.GAPS_16: np.uint16}


@dataclass(frozen=True, slots=True)
class Note:
    """The announcement of a message: its form, the number of its changed words, and its length in bytes."""

    form: Encoding
    changed: int
    nbytes: int

    def to_bytes(self) -> bytes:
        """Return the note in NOTE_BYTES bytes."""
        return _NOTE.pack(self.form, self.changed, self.nbytes)

    @classmethod
    def from_bytes(cls, data: bytes, nbytes: int, width: int) -> Note:
        """Read the note of a message that has `nbytes` bytes in words of `width`.

        Raises:
            TransportError: the note is impossible: the delta would be longer than the message, or change more
                words than it has, or its length does not fit its form.
        """
        form, changed, length = _NOTE.unpack(data)
        words, codes = nbytes // width, length - changed * width
        some = 0 < changed <= words and length < nbytes
        fits = {
            Encoding.WHOLE: not changed and length == nbytes,
            Encoding.UNCHANGED: not changed and not length,
            Encoding.GAPS_8: some and codes >= changed,
            Encoding.GAPS_16: some and codes >= 2 * changed and not codes % 2,
        }
        if not fits.get(form, False):
            raise TransportError(
                f"a message of {words} words of {width} bytes cannot come in form {form} with {changed} changed words "
                f"and {length} bytes"
            )
        return cls(Encoding(form), changed, length)


@dataclass(slots=True)
class Delta:
    """The encoded delta of a message."""

    note: Note
    body: Bytes


class Comparison:
    """Finds the changed words of a message, part after part, and encodes them."""

    def __init__(self, nbytes: int, width: int) -> None:
        """The message has `nbytes` bytes in words of `width`."""
        self._nbytes, self._width = nbytes, width
        self._compared = self._changed = 0
        self._positions: list[Int64] = []
        self._values: list[npt.NDArray[Any]] = []

    def add(self, new: Bytes, base: Bytes, at: int) -> bool:
        """Compare bytes `at` and following of the message; return False once a delta is not worth it."""
        words = new.view(WORDS[self._width])
        found = np.flatnonzero(words != base.view(WORDS[self._width]))
        self._compared += len(words)
        self._changed += len(found)
        if self._changed > self._compared // MOST_CHANGED + self._nbytes // self._width // SLACK:
            return False
        self._values.append(words[found])
        found += at // self._width
        self._positions.append(found)
        return True

    def delta(self) -> Delta | None:
        """Return the shortest delta; None if the message itself is shorter."""
        if not self._changed:
            return Delta(Note(Encoding.UNCHANGED, 0, 0), np.empty(0, np.uint8))
        gaps = np.concatenate(self._positions)
        gaps[1:] -= gaps[:-1] + 1
        lengths = {form: _length(gaps, code) for form, code in _CODES.items()}
        form = min(lengths, key=lambda form: lengths[form])
        values = np.concatenate(self._values).view(np.uint8)
        nbytes = len(values) + lengths[form]
        if nbytes >= self._nbytes:
            return None
        return Delta(Note(form, len(gaps), nbytes), np.concatenate([values, _codes(gaps, _CODES[form])]))


def apply(note: Note, body: Bytes, message: Bytes, width: int) -> None:
    """Turn the base in `message` into the message. `note` has been checked, `body` has its length.

    Raises:
        TransportError: the delta names words that the message does not have; nothing was written.
    """
    if not note.changed:
        return
    words, at = message.view(WORDS[width]), note.changed * width
    positions = _positions(body[at:].view(_CODES[note.form]))
    last = int(positions[-1]) if len(positions) else -1
    if len(positions) != note.changed or last >= len(words):
        raise TransportError(
            f"a delta of {note.changed} words has {len(positions)} positions, up to {last}, in a message of "
            f"{len(words)} words"
        )
    words[positions] = body[:at].view(WORDS[width])


def _length(gaps: Int64, code: type[np.generic]) -> int:
    """Return the bytes of the codes of these gaps."""
    longest = np.iinfo(code).max  # type: ignore[type-var]
    more = int((gaps // longest).sum()) if gaps.max() >= longest else 0
    return (len(gaps) + more) * np.dtype(code).itemsize


def _codes(gaps: Int64, code: type[np.generic]) -> Bytes:
    longest = np.iinfo(code).max  # type: ignore[type-var]
    if gaps.max() < longest:
        return gaps.astype(code).view(np.uint8)
    more = gaps // longest
    found = np.full(len(gaps) + int(more.sum()), longest, code)
    found[np.cumsum(more + 1) - 1] = gaps - more * longest
    return found.view(np.uint8)


def _positions(codes: npt.NDArray[Any]) -> Int64:
    longest = np.iinfo(codes.dtype).max
    steps = codes.astype(np.int64)
    ends = codes != longest
    steps += ends
    np.cumsum(steps, out=steps)
    steps -= 1
    return steps if ends.all() else steps[ends]


# Runs with deltas count as slower if they take SLOWER times as long as whole ones, and NOISE_S seconds more.
SLOWER, NOISE_S = 1.1, 0.1

LONGEST_REST = 16


@dataclass(slots=True)
class Pace:
    """Decides whether a stream is sent as deltas, from the durations of its whole runs and its runs with deltas.

    If deltas are slower in two runs in a row, the next run is sent whole; if slower again, the next two, four, ...
    """

    whole: float = 0.0  # bytes of pieces a second, in the last run; 0 before it
    slow: int = 0  # runs with deltas, in a row, that were slower
    rest: int = 0  # runs that go whole before the next try

    def wants_deltas(self) -> bool:
        """Return whether the next run should send deltas. Call it once per run."""
        self.rest, rests = max(0, self.rest - 1), self.rest > 0
        return not rests

    def took(self, seconds: float, nbytes: int, *, as_deltas: bool) -> None:
        """Record the duration of a run and its bytes."""
        if not as_deltas:
            self.whole = nbytes / seconds
            return
        is_slow = self.whole > 0 and seconds > SLOWER * nbytes / self.whole + NOISE_S
        self.slow = self.slow + 1 if is_slow else 0
        self.rest = min(LONGEST_REST, 1 << (self.slow - 2)) if self.slow >= 2 else 0
