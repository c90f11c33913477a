"""Make a static site of README.md and the pages that it links to: `scripts/docs --site DIR`."""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt  # rich needs it anyway
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1rem auto; padding: 0 1rem }}
pre, table {{ overflow-x: auto; display: block }}
pre, code {{ font-size: .9em; background: #8882 }}
pre {{ padding: .5rem }}
td, th {{ padding: .2rem .6rem; border-top: 1px solid #8888; text-align: left; vertical-align: top }}
</style></head><body><nav><a href="{up}README.html">refitd</a> - <a href="{up}docs/README.html">all pages</a></nav>
{body}
</body></html>
"""


def slug(title: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def build(out: Path) -> list[Path]:
    """Write every page reachable from README.md, and copy other linked files; return the pages."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table"])
    waiting, done = [ROOT / "README.md"], []
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.append(path)
        tokens = parser.parse(path.read_text())
        title = path.stem
        for i, token in enumerate(tokens):
            if token.type == "heading_open":
                text = tokens[i + 1].content
                title = text if token.tag == "h1" else title
                token.attrSet("id", slug(re.sub(r"\]\([^)]*\)|[`*\[]", "", text)))
        for link in links(tokens):
            target, _, anchor = str(link.attrGet("href")).partition("#")
            found = (path.parent / target).resolve()
            if "://" in target or not target:
                continue
            if found.is_dir():
                found = found / "README.md"
            if found.suffix == ".md":
                waiting.append(found)
                relative = os.path.relpath(found.with_suffix(".html"), path.parent)
                link.attrSet("href", relative + (f"#{anchor}" if anchor else ""))
            else:
                copied = out / found.relative_to(ROOT)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(found, copied)
        page = out / path.relative_to(ROOT).with_suffix(".html")
        page.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (len(path.relative_to(ROOT).parts) - 1)
        body = parser.renderer.render(tokens, parser.options, {})
        page.write_text(PAGE.format(title=html.escape(title), up=up, body=body))
    return done


def links(tokens: list[Token]) -> Iterator[Token]:
    """Yield every link."""
    for token in tokens:
        if token.type == "link_open":
            yield token
        yield from links(token.children or [])


if __name__ == "__main__":
    print(f"{len(build(Path(sys.argv[1])))} pages in {sys.argv[1]}")
