"""What others have written or passed, as it may stand in an error, a log or on a terminal."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

# Characters that a history keeps of one event.
BRIEF = 300


def printable(text: object) -> str:
    """Return text on one line in which nothing moves a cursor, hides or reorders what stands beside it.

    What is neither a letter, a number, a sign nor a space is written as Python writes it: line and paragraph
    separators, other control characters (C0, C1, DEL), bidirectional overrides and other invisible formats, surrogates.
    """
    found = str(text)
    if found.isprintable():
        return found
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in found)


def printable_lines(text: str) -> str:
    """Return text of several lines, each `printable` and moved to the right: none looks like the log's own."""
    return "\n".join(f"    {printable(line)}" for line in text.split("\n"))


def brief(text: str) -> str:
    """Return what a history keeps of a text: its beginning, where it is long."""
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 4]} ..."


def flaw(text: str) -> str:
    """Return what keeps a text from being a name or a path, "" if nothing does."""
    if "\0" in text:
        return "holds a NUL character, which no name and no path can hold"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode (a byte that is not UTF-8?)"
    return ""


def unprintable(text: str) -> str:
    """Return what keeps a text that an operator has chosen from being shown as it is, "" if nothing does."""
    return flaw(text) or ("" if text.isprintable() else "holds a control character, or one that cannot be seen")


def shown(value: Any) -> str:
    """Return a value as an error shows it: cut where it is long, with its type."""
    try:
        found = repr(value)
    except Exception:  # of another's class, which is no reason to lose the error
        found = "..."
    return f"{found[:80]} ({type(value).__name__})"


def nearest(name: str, known: Iterable[str], count: int = 5) -> list[str]:
    """Return the known names that are most like a name that is not among them, the most similar first."""
    return difflib.get_close_matches(name, list(known), count, cutoff=0.3)
