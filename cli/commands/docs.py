"""refitctl docs: print a page of the documentation, or an example configuration, of this refitd."""

from __future__ import annotations

from pathlib import Path

import click

import refitd
import refitd_cli
from refitd.errors import ConfigError
from refitd.text import nearest
from refitd_cli.output import print_table
from refitd_cli.printed import DocsPrinted
from refitd_cli.session import Session, prints

FOLDERS = ("docs", "configs")


def shipped() -> Path:
    """Return the folder that holds FOLDERS: in an installed package beside the commands, else the checkout."""
    installed = Path(refitd_cli.__file__).with_name("shipped")
    return installed if installed.is_dir() else Path(refitd.__file__).parents[1]


def pages() -> dict[str, Path]:
    """Return the files by name: `operate` for docs/operate.md, `configs/node.toml` as it is."""
    root = shipped()
    files = (path for name in FOLDERS for path in sorted((root / name).rglob("*")) if path.is_file())
    names = {path.relative_to(root).as_posix(): path for path in files if "__pycache__" not in path.parts}
    return {name.removeprefix("docs/").removesuffix(".md"): path for name, path in names.items()}


@click.command()
@click.argument("page", required=False)
@prints
def docs(session: Session, page: str | None) -> None:
    """Print a page of the documentation or an example configuration; without PAGE list them.

    For example `refitctl docs runbook`, or `refitctl docs configs/laptop.toml > laptop.toml`.
    """
    found = pages()
    if page is None:
        titles = {name: _title(path) for name, path in found.items()}
        session.show(DocsPrinted(titles), lambda listed: print_table("", ("page", "title"), listed.pages.items()))
        return
    name = page.removeprefix("docs/").partition("#")[0].removesuffix(".md")
    if name not in found:
        near = ", ".join(nearest(name, found, 3))
        raise ConfigError(f"there is no page {page!r}{near and f'; similar: {near}'}; `refitctl docs` lists all")
    text = found[name].read_text()
    session.show(DocsPrinted({name: _title(found[name])}, text), lambda printed: click.echo(printed.text, nl=False))


def _title(path: Path) -> str:
    """Return a page's heading, or the first comment of a configuration."""
    first = path.read_text().partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") and not first.startswith("#!") else ""
