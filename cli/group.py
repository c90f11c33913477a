"""The command group of both programs: loads commands when used, ends every error in one clear message."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import click

from refitd.errors import ConfigError, PlanError, RefitdError

EXIT_FAILED = 1
EXIT_USAGE = 2


class Commands(click.Group):
    """A group whose commands are named as "module:attribute" and imported when they are asked for.

    A RefitdError that leaves a command is printed without a traceback: as text on stderr or, if the command
    line holds `--json`, as one object on stdout. The exit status is then 1, and 2 where the command line or a
    configuration is at fault.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)
        self._wants_json = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order they are shown by --help."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self._lazy[cmd_name]} is {type(command).__name__}, not a click command")
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note whether the caller is a program: an error in its arguments must reach it as JSON, too."""
        self._wants_json = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; translate what it raises into a message and an exit status."""
        try:
            return super().invoke(ctx)
        except RefitdError as exc:
            if self._wants_json:
                click.echo(json.dumps(error_object(exc)))
            else:
                click.echo(f"{ctx.command_path}: {exc}", err=True)
            ctx.exit(EXIT_USAGE if isinstance(exc, ConfigError) else EXIT_FAILED)
        except click.UsageError as exc:
            if not self._wants_json:
                raise
            click.echo(json.dumps(_error("usage", exc.format_message(), {})))
            ctx.exit(EXIT_USAGE)


def error_object(error: RefitdError) -> dict[str, Any]:
    """Return what --json prints for an error: its code, its message and, if ranks failed, who and why."""
    causes: Mapping[str, str] = getattr(error, "causes", {})
    if isinstance(error, PlanError):
        causes = {str(index): text for index, text in enumerate(error.violations)}
    return _error(error.code, str(error), causes)


def _error(code: str, message: str, causes: Mapping[str, str]) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "causes": dict(causes)}}
