"""Pieces of the dashboard's page: foreign text as HTML, and parts that are fetched when opened."""

from __future__ import annotations

from html import escape
from urllib.parse import quote, unquote

from refitd.text import printable


def text(given: str) -> str:
    """Return foreign text as HTML: markup and control characters are shown without effect."""
    return escape(printable(given))


def line(given: str, tone: str = "") -> str:
    """Return a paragraph; `tone` ("good", "warn", "bad", "dim") colours it."""
    return f'<p class="{tone}">{text(given)}</p>'


def path(kind: str, *words: str) -> str:
    """Return the path of a part of the page; `words` may be any text, also ".." or "a/b"."""
    return f"/{kind}" + "".join(f"/={quote(word, safe='')}" for word in words)


def words_of(found: str) -> tuple[str, ...]:
    """Return kind and words of a path, () if it is none."""
    nothing, *words = found.split("/")
    if nothing or not words or not all(word.startswith("=") for word in words[1:]):
        return ()
    return words[0], *(unquote(word[1:]) for word in words[1:])


def closed(summary: str, source: str, key: str, *, changes: bool = False) -> str:
    """Return a line that opens. The page's script then fetches from `source`, again and again if that `changes`.

    An open part stays open while its `key` is on the page.
    """
    again = " data-again" if changes else ""
    return (
        f'<details data-key="{text(key)}" data-source="{escape(source)}"{again}>'
        f"<summary>{text(summary)}</summary><div></div></details>"
    )
