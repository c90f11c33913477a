"""Options shared by `refitd serve` and `refitd coordinator`: the configuration file and its overrides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from refitd import config

_FLAGS = {"node.runtime_dir": "--runtime-dir", "node.workers": "--workers", "log.level": "--log-level"}

F = TypeVar("F", bound=Callable[..., Any])


def config_options(function: F) -> F:
    """Add --config and flags. Precedence: flag > environment > file > default."""
    for option in (
        click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Over log.level."),
        click.option("--runtime-dir", metavar="DIR", help="Over node.runtime_dir: where the sockets are."),
        click.option("--config", "path", metavar="FILE", help="TOML; without one, defaults that suit a laptop."),
    ):
        function = option(function)
    return function


def read(path: str | None, **flags: Any) -> tuple[config.Config, dict[str, str]]:
    """Read the configuration as `load`; also return what has set each key that is set: file, variable or flag."""
    found, origins = config.read(path, **{name.replace("__", "."): value for name, value in flags.items()})
    return found, {key: _FLAGS.get(origin, origin) for key, origin in origins.items()}


def load(path: str | None, **flags: Any) -> config.Config:
    """Read the configuration; a flag is named "section__key" and counts if it is not None."""
    return config.load(path, **{name.replace("__", "."): value for name, value in flags.items()})
