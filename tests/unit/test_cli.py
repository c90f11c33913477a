"""Whatever refitctl and refitd are asked: exit statuses, JSON, errors a person can act on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click
import pytest
from click.testing import CliRunner

from refitd.errors import ConfigError, TransportError
from refitd_cli import output
from refitd_cli.control import COMMANDS
from refitd_cli.control import main as refitctl
from refitd_cli.daemon import main as refitd
from tests.support.cli import FakeClient, run


def leaves(group: click.Group, *before: str) -> Iterator[tuple[str, ...]]:
    """The words of every command that is no group."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from leaves(command, *before, name)
        else:
            yield (*before, name)


COMMANDS_OF_THE_DAEMON: dict[str, tuple[str, ...]] = {
    "swap": ("swap", "policy"),
    "status": ("status",),
    "watch": ("watch", "--count", "1"),
    "models": ("models",),
    "plan": ("plan", "policy"),
    "abort": ("abort", "policy"),
    "verify": ("verify", "policy"),
}
ALL = pytest.mark.parametrize("arguments", COMMANDS_OF_THE_DAEMON.values(), ids=COMMANDS_OF_THE_DAEMON.keys())


@ALL
def test_success_exits_0_and_leaves_the_daemon(arguments):
    client = FakeClient()
    ran = run(client, *arguments)
    assert (ran.status, ran.stderr, client.closed) == (0, "", True)
    assert ran.stdout


@ALL
def test_json_is_one_object(arguments):
    ran = run(FakeClient(), *arguments, "--json")
    assert ran.status == 0
    assert ran.object
    assert "error" not in ran.object


@ALL
def test_address_reaches_the_client(arguments):
    client = FakeClient()
    run(client, *arguments, "--address", "/run/elsewhere")
    assert ("connect", "/run/elsewhere") in client.asked


@ALL
def test_daemon_that_does_not_run_is_one_message_and_exit_1(arguments):
    ran = run(TransportError("no daemon runs in /run/refitd; start one"), *arguments)
    expected = "refitctl: no daemon runs in /run/refitd; start one\n"
    assert (ran.status, ran.stdout, ran.stderr) == (1, "", expected)


@ALL
def test_daemon_that_does_not_run_is_an_error_object_in_json(arguments):
    ran = run(TransportError("no daemon runs"), *arguments, "--json")
    error = {"code": "transport", "message": "no daemon runs", "causes": {}}
    assert (ran.status, ran.object, ran.stderr) == (1, {"error": error}, "")


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json")])
def test_a_package_of_an_extra_that_is_missing_is_named_with_the_extra(arguments):
    lacks = ModuleNotFoundError("No module named 'torch'", name="torch")
    ran = run(lacks, *arguments)
    assert ran.status == 1 and "`pip install 'refitd[torch]'` brings it" in ran.stdout + ran.stderr
    with pytest.raises(ModuleNotFoundError):
        run(ModuleNotFoundError("No module named 'refitd.nosuch'", name="refitd.nosuch"), *arguments)


def test_configuration_errors_exit_2():
    assert run(ConfigError("node.workers: 0"), "status").status == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("swap",),
        ("swap", "policy", "--version", "-1"),
        ("swap", "policy", "--timeout", "0"),
        ("fly",),
        ("plan", "p", "-z"),
        ("watch", "--interval", "0"),
    ],
)
def test_wrong_command_lines_exit_2_in_words_and_in_json(arguments):
    ran = run(FakeClient(), *arguments)
    assert (ran.status, ran.stdout) == (2, "")
    assert "Usage" in ran.stderr
    ran = run(FakeClient(), *arguments, "--json")
    assert (ran.status, ran.object["error"]["code"]) == (2, "usage")


def test_abort_passes_the_reason():
    client = FakeClient()
    run(client, "abort", "policy", "--reason", "bad reward")
    assert ("abort", "policy", "bad reward") in client.asked


def test_every_command_has_help_and_json():
    runner = CliRunner()
    for words in leaves(refitctl):
        result = runner.invoke(refitctl, [*words, "--help"])
        assert result.exit_code == 0, words
        assert "--json" in result.stdout, words
    listed = runner.invoke(refitctl, ["--help"]).stdout
    assert "..." not in listed.partition("Commands:")[2]
    assert all(f"\n  {name}" in listed for name in COMMANDS)


@pytest.mark.parametrize("command", ["serve", "coordinator"])
@pytest.mark.parametrize(("text", "named"), [("[node]\nwrokers = 1\n", "wrokers"), (None, "cannot be read")])
def test_refitd_with_a_bad_configuration_exits_2_and_names_it(tmp_path, command, text, named):
    path = tmp_path / "refitd.toml"
    if text is not None:
        path.write_text(text)
    result = CliRunner().invoke(refitd, [command, "--config", str(path)], prog_name="refitd")
    assert (result.exit_code, result.stdout) == (2, "")
    assert named in result.stderr
    assert str(path) in result.stderr


def test_no_option_takes_nan_for_a_number():
    options = [
        option
        for words in leaves(refitctl)
        for option in command_of(refitctl, words).params
        if isinstance(option.type, click.types.FloatParamType)
    ]
    assert len(options) >= 9
    for option in options:
        with pytest.raises(click.BadParameter, match="not a number"):
            option.type.convert("nan", option, None)


def command_of(group: click.Group, words: tuple[str, ...]) -> click.Command:
    command: click.Command = group
    for word in words:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found
    return command


def test_refitd_flags_stand_above_the_file(tmp_path):
    path = tmp_path / "refitd.toml"
    path.write_text("[node]\nworkers = 2\n")
    result = CliRunner().invoke(refitd, ["serve", "--config", str(path), "--workers", "65"])
    assert result.exit_code == 2
    assert "workers" in result.stderr


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (output.size, 0, "0 B"),
        (output.size, 999, "999 B"),
        (output.size, 1_073_741_824, "1.07 GB"),
        (output.size, 999_900_000, "1 GB"),
        (output.size, 5 * 10**12, "5.00 TB"),
        (output.duration, 0.00085, "850 us"),
        (output.duration, 0.0123, "12.3 ms"),
        (output.duration, 1.234, "1.23 s"),
        (output.duration, 75.2, "75 s"),
    ],
)
def test_units_are_readable(function: Callable[[float], str], value, text):
    assert function(value) == text


def test_no_time_has_no_rate():
    assert output.rate(10, 0.0) == "-"
