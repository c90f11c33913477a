"""The command group of both programs: loads commands when used, ends every error in one clear message."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from refitd.errors import ConfigError, PlanError, RefitdError
from refitd.logs import as_error
from refitd.service import end
from refitd.text import nearest, printable
from refitd_cli import ends

EXIT_FAILED = 1
EXIT_USAGE = 2

# Packages that some commands import, and the extra that installs each.
EXTRAS = {"torch": "torch", "opentelemetry": "otel", "opentelemetry.sdk": "otel", "opentelemetry.exporter": "otel"}
_SENTENCE = 400  # characters


# Options of most commands, which may precede the command's name; with whether a value follows.
SHARED = {"--json": False, "--runtime-dir": True, "--address": True, "--uid": True}


class Listed(click.Group):
    """A group whose --help has the whole first sentence of each command; click's would cut it to one line.

    `elsewhere` maps names of another program's commands to how they are called.
    """

    def __init__(self, *args: Any, elsewhere: Mapping[str, str] = {}, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._elsewhere = elsewhere

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; options of SHARED before the command become the command's."""
        count = 0
        while count < len(args) and (found := args[count].partition("="))[0] in SHARED:
            count += 2 if SHARED[found[0]] and not found[1] else 1
        if 0 < count < len(args):
            args = [args[count], *args[:count], *args[count + 1 :]]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; the error for an unknown one names the nearest."""
        name = args[0] if args else ""
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            known = {each: f"{ctx.command_path} {each}" for each in self.list_commands(ctx)}
            meant = self._elsewhere.get(name)
            if meant is None and (close := nearest(name, known, 1, cutoff=0.6)):
                meant = known[close[0]]
            raise click.UsageError(f"No such command {name!r}.{f' Did you mean `{meant}`?' if meant else ''}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every command with the first sentence of its help."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(_SENTENCE)) for name, command in commands if command])


class Commands(Listed):
    """A group whose commands are named as "module:attribute" and imported when they are asked for.

    A RefitdError that leaves a command is printed without a traceback: as text on stderr or, if the command
    line holds `--json`, as one object on stdout. The exit status is then 1, and 2 where the command line or a
    configuration is at fault. So are output that cannot be written, an interrupt (130) and errors of the system.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, str], prints: bool = True, **kwargs: Any) -> None:
        """`lazy` maps names to commands; `prints`: they need a stdout."""
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)
        self._prints = prints
        self._wants_json = False

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> int:
        """Run the program and exit with its status; without `standalone_mode`, return the status."""
        name = prog_name or ends.program() or self.name or ""
        given = list(sys.argv[1:] if args is None else args)
        ends.loud()
        try:
            status = self._status(given, name, complete_var, extra)
        except KeyboardInterrupt:
            status = _interrupted(name)
        ends.quiet()
        if standalone_mode:
            if ends.program():
                end(status)
            sys.exit(status)
        return status

    def _status(self, args: list[str], name: str, complete_var: str | None, extra: dict[str, Any]) -> int:
        try:
            if sys.stdout is None:
                if self._prints:
                    _complain(f"{name}: stdout is closed, and the output would be lost; give it a file, or /dev/null")
                    return EXIT_FAILED
                sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  where `ends.begin` has led it
            found = super().main(args, name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.UsageError as exc:
            _show_usage(exc)
            return exc.exit_code
        except click.ClickException as exc:
            _complain(f"{name}: {exc.format_message()}")
            return exc.exit_code
        except click.Abort:
            return _interrupted(name)
        except _SystemSaid as exc:
            return _ended(name, exc.error)
        except OSError as exc:
            return _ended(name, exc)
        return found if isinstance(found, int) else 0

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        """Read the arguments."""
        with _told():
            for number, text in enumerate(args, 1):
                if "\0" in text:
                    raise click.UsageError(f"argument {number}, {text!r}, holds a NUL character")
            return super().make_context(info_name, args, *rest, **extra)

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
        """Note whether --json is given: errors in arguments are then JSON, too."""
        self._wants_json = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; translate what it raises into a message and an exit status."""
        try:
            with _told():
                return super().invoke(ctx)
        except RefitdError as exc:
            if self._wants_json:
                click.echo(json.dumps(error_object(exc)))
            else:
                first, *more = error_lines(exc)
                for line in (f"{ctx.command_path}: {first}", *more):
                    _complain(line)
            ctx.exit(EXIT_USAGE if isinstance(exc, ConfigError) else EXIT_FAILED)
        except ModuleNotFoundError as exc:
            if exc.name not in EXTRAS:
                raise
            lacks = f"{exc.name} is not installed; `pip install 'refitd[{EXTRAS[exc.name]}]'` brings it"
            if self._wants_json:
                click.echo(json.dumps(_error("missing", lacks, {})))
            else:
                click.echo(f"{ctx.command_path}: {lacks}", err=True)
            ctx.exit(EXIT_FAILED)
        except click.UsageError as exc:
            if not self._wants_json:
                raise
            click.echo(json.dumps(_error("usage", _plain(exc), {})))
            ctx.exit(EXIT_USAGE)


class _SystemSaid(Exception):
    """Carries the error for which click would end the program itself."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Hide broken pipes and Ctrl-C from click, which would handle them its own way."""
    try:
        yield
    except BrokenPipeError as exc:
        raise _SystemSaid(exc) from exc
    except KeyboardInterrupt as exc:
        raise click.Abort() from exc


def _complain(line: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(as_error(printable(line)), err=True)


def _interrupted(name: str) -> int:
    _complain(f"{name}: interrupted")
    return ends.EXIT_INTERRUPTED


def _ended(name: str, error: OSError) -> int:
    ends.drop_output()
    _complain(f"{name}: {ends.why(error)}")
    return EXIT_FAILED


def _show_usage(error: click.UsageError) -> None:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return
    if error.ctx is not None:
        for line in error.ctx.get_usage().splitlines():
            _complain(line)
        if error.ctx.command.get_help_option(error.ctx) is not None:
            _complain(f"Try '{error.ctx.command_path} {error.ctx.help_option_names[0]}' for help.")
        _complain("")
    _complain(f"Error: {_plain(error)}")


_NUMBERS = {"integer": "whole number", "float": "number"}
# click's sentences about a value, and ours
_SENTENCES = (
    (r"('.*') is not a valid (integer|float)( range)?\.", lambda m: f"{m[1]} is no {_NUMBERS[m[2]]}"),
    (r"(\S+) is not in the range (\S+)<=x<=(\S+)\.", r"\1 is not in \2..\3"),
    (r"(\S+) is not in the range x>=(\S+)\.", r"\1 is less than \2"),
    (r"(\S+) is not in the range x>(\S+)\.", r"\1 is not more than \2"),
    (r"Missing (argument|option|parameter) '(.*)'\.", r"\2 is missing"),
    (r"Got unexpected extra arguments? \((.*)\)", r"\1 is one argument too many"),
)


def _plain(error: click.UsageError) -> str:
    """Return click's message in plain words."""
    found = error.format_message()
    for pattern, ours in _SENTENCES:
        found = re.sub(pattern, ours, found)
    return found


def error_lines(error: RefitdError) -> list[str]:
    """Return an error as lines: one, or one per reason for a plan."""
    return str(error).splitlines() if isinstance(error, PlanError) else [str(error)]


def error_object(error: RefitdError) -> dict[str, Any]:
    """Return the JSON object of an error: its code, its message and, if ranks failed, each with its reason."""
    causes: Mapping[str, str] = getattr(error, "causes", {})
    if isinstance(error, PlanError):
        causes = {str(index): text for index, text in enumerate(error.violations)}
    return _error(error.code, str(error), causes)


def _error(code: str, message: str, causes: Mapping[str, str]) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "causes": dict(causes)}}
