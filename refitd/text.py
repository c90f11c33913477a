"""Make text from other processes and callers safe for errors, logs and terminals."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

# The most characters that a history keeps of one event.
BRIEF = 300


def printable(text: object) -> str:
    """Return text on one line, with every character escaped that could move a cursor or hide or reorder text.

    Escaped as in Python literals: line and paragraph separators, control characters (C0, C1, DEL), bidirectional
    overrides and other invisible formats, surrogates.
    """
    found = str(text)
    if found.isprintable():
        return found
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in found)


def printable_lines(text: str) -> str:
    """Return text with each line made `printable` and indented, to tell it from lines of the log itself."""
    return "\n".join(f"    {printable(line)}" for line in text.split("\n"))


def brief(text: str) -> str:
    """Truncate text to BRIEF characters."""
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 4]} ..."


def flaw(text: str) -> str:
    """Return why a text cannot be a name or a path, "" if it can."""
    if "\0" in text:
        return "holds a NUL character, which no name and no path can hold"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode (a byte that is not UTF-8?)"
    return ""


def unprintable(text: str) -> str:
    """Return why a text chosen by an operator cannot be shown unescaped, "" if it can."""
    return flaw(text) or ("" if text.isprintable() else "holds a control character, or one that cannot be seen")


def shown(value: Any) -> str:
    """Return a value's repr, truncated, and its type, for an error message."""
    try:
        found = " ".join(repr(value).split())  # a tensor's has several lines
    except Exception:  # a foreign class's repr may raise; the error message must not be lost
        found = "..."
    return f"{found[:80]} ({type(value).__name__})"


_TYPES = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "null": "nothing"}
_TYPES |= {"array": "a list", "object": "a table", "bytes": "bytes"}


def _in_words(kinds: str) -> str:
    return " or ".join(_TYPES.get(kind, kind) for kind in kinds.split(" | "))


def mismatch(problem: str) -> tuple[str, str]:
    """Return (place, sentence) of a ValidationError of msgspec: "Expected `int`, got `str` - at `$.node.workers`".

    The place is "node.workers", "" for the whole value.
    """
    said, _, place = problem.partition(" - at `")
    said = re.sub(r"`([\w |]+)`", lambda found: _in_words(found[1]), said)
    said = said.replace("Expected ", "expected ").replace(", got ", ", found ").replace(" of length", " with a length")
    said = said.replace("matching regex", "that matches")
    said = re.sub(r"Object (contains|missing) (unknown|required) field (.*)", r"\2 key `\3`", said)
    said = re.sub("^required key", "missing key", said).replace("Invalid enum value", "unknown choice")
    return place.rstrip("`").removeprefix("$").removeprefix("."), said


def named(labels: Sequence[str]) -> str:
    """Return "a", or "a and 3 more like it"."""
    return labels[0] + (f" and {len(labels) - 1} more like it" if len(labels) > 1 else "")


def called(member: str) -> str:
    """Return a registration's name for people: its id without the number, " (#19)"."""
    return member.rpartition(" (#")[0] or member


def target_rank(replica: str, rank: int) -> str:
    """Return the name of a target's rank: "replica 'a' rank 0"."""
    return f"replica {replica!r} rank {rank}"


def nearest(name: str, known: Iterable[str], count: int = 5, cutoff: float = 0.3) -> list[str]:
    """Return the known names most similar to an unknown name, the most similar first; `cutoff` is in 0..1."""
    return difflib.get_close_matches(name, list(known), count, cutoff)
