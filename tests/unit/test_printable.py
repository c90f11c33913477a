"""Foreign text cannot move a cursor: one function escapes it for terminals and logs."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import unicodedata
from typing import Any

import msgspec
import pytest

import refitd
from refitd.buffers import arena
from refitd.config import load
from refitd.errors import ConfigError, PlanError, RefitFailed, RefusedError, TransportError, from_code
from refitd.logs import Escaped, _LineFormatter
from refitd.protocol import local
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.keys import check_names
from refitd.protocol.plan_reports import DescribedMember, ModelDescription
from refitd.protocol.reports import (
    Difference,
    DrainedSource,
    DrainReport,
    EvictReport,
    ForgetReport,
    ReloadReport,
    ReplicaName,
    SwapProgress,
)
from refitd.protocol.shards import Shard, shard_of
from refitd.text import flaw, printable, printable_lines
from refitd_cli.control import COMMANDS
from refitd_cli.output import bar_fields
from tests.support.cli import ABORTED, FakeClient, run

HOSTILE = {
    "red": "\x1b[31mred\x1b[0m",
    "title": "\x1b]0;owned\x07",
    "clear": "\x1bc\x1b[2J\x1b[H",
    "newline": "a\nrefitctl: policy: version 9 is live",
    "return": "harmless\rpolicy",
    "tab and backspace": "a\tb\x08\x08",
    "delete": "a\x7fb",
    "c1": "a\x9b31mb\x85c",
    "bidi": "abc\u202egnp.exe\u2066x\u2069",
    "separators": "a\u2028b\u2029c",
    "invisible": "a\u200bb\ufeffc\u00ad",
    "markup": "[red]x[/red] [link=http://x]y[/link] [/]",
    "emoji": ":boom: :smile:",
    "surrogate": "caf\udce9",
    "wide": "重み-é",
}


def test_every_code_point_is_shown_as_it_is_or_escaped_on_its_line():
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        shown = printable(f"a{char}b")
        assert shown.isprintable() and len(shown.splitlines()) == 1
        assert (shown == f"a{char}b") == char.isprintable()
    risky = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Zl", "Zp", "Cs")
    ]
    assert len(risky) > 2000 and not any(char in printable(char) for char in risky)


def test_lines_of_a_traceback_never_look_like_the_logs_own():
    shown = printable_lines("Traceback\nValueError: x\nt=2026 level=info event=forged\x1b[2J")
    assert all(line.startswith("    ") and line.isprintable() for line in shown.split("\n"))


# --- every command ------------------------------------------------------------------------------------------

_KEPT = {"outcome", "state", "phase", "kind", "role", "dtype", "digest"}  # words of refitd's own


def poisoned(value: Any, text: str, name: str = "") -> Any:
    """The same report with `text` in every name and reason in it."""
    if isinstance(value, msgspec.Struct):
        fields = {name: poisoned(getattr(value, name), text, name) for name in value.__struct_fields__}
        return type(value)(**fields)
    if isinstance(value, tuple):
        return tuple(poisoned(inner, text, name) for inner in value)
    return value + text if isinstance(value, str) and name not in _KEPT else value


def described(name: str) -> Shard:
    """A rank that holds one whole tensor of this name."""
    return shard_of(
        [refitd.ParameterMetadata(name, (2, 2), "float32", 4, owner_rank=0, resolved_name=name)]  # type: ignore[arg-type]
    )


class Peer(FakeClient):
    """A daemon whose names and reasons are hostile."""

    text = ""

    def history(self, model="", limit=20):
        return poisoned(super().history(model, limit), self.text)

    def trace(self, model, swap=""):
        return poisoned(super().trace(model, swap), self.text)

    def evict(self, model, replica, rank, reason):
        return poisoned(EvictReport(model=model, replica=replica, members=("a rank 0",)), self.text)

    def forget(self, model):
        return poisoned(ForgetReport(model=model, sources=("source rank 0",), nodes=("n0",)), self.text)

    def reload(self):
        return poisoned(ReloadReport(uses_keys=True, admitted=("a",), removed=("n0",)), self.text)

    def drain(self, node, timeout=None, wait=True, on_progress=None):
        report = DrainReport(
            node=node,
            changed=True,
            replicas=(ReplicaName("m", "a"),),
            stranded=("m",),
            sources=(DrainedSource("m", 0, "h", 1),),
            running=(SwapProgress("s", "m", 1, "stage"),),
        )
        return poisoned(report, self.text)

    def resume(self, node):
        return poisoned(DrainReport(node=node, changed=True, replicas=(ReplicaName("m", "a"),)), self.text)

    def describe(self, model):
        shard = described(f"w{self.text}")
        member = DescribedMember(role="source", replica="", rank=0, world_size=1, node="n", host="h", shard=0)
        return poisoned(ModelDescription(model=model, shards=(shard,), members=(member,)), self.text)


def peer(text: str, *, fails: bool = False) -> Peer:
    made = Peer()
    made.text = text
    for field in ("swap_result", "status_result", "plan_result", "verify_result"):
        setattr(made, field, poisoned(getattr(made, field), text))
    if fails:
        made.swap_result = poisoned(ABORTED, text)
        made.status_result = TransportError(f"no daemon {text}")
        made.plan_result = PlanError([f"w{text}: nobody has it", f"v{text}: nor this"])
        made.abort_result = RefusedError(f"model {text}: no swap is running")
        difference = Difference(parameter=f"w{text}", slice=f"[0]{text}", shape=(2, 2), first=0, last=0, differing=1)
        proof = msgspec.structs.replace(
            made.verify_result.members[0], state="differs", differences=(difference,), blocks=3
        )
        made.verify_result = msgspec.structs.replace(
            made.verify_result, outcome="differs", members=(proof,), mixed=(f"mixed {text}",)
        )
    return made


ASKED: dict[str, tuple[str, ...]] = {
    "swap": ("swap", "policy"),
    "rollback": ("rollback", "policy"),
    "verify": ("verify", "policy"),
    "history": ("history",),
    "status": ("status",),
    "wait": ("wait", "--timeout", "0"),
    "watch": ("watch", "--count", "1"),
    "models": ("models",),
    "trace": ("trace", "policy", "--output", os.devnull),
    "plan": ("plan", "policy"),
    "manifest": ("manifest", "policy"),
    "abort": ("abort", "policy"),
    "forget": ("forget", "policy"),
    "reload": ("reload",),
    "drain": ("drain", "n0"),
    "resume": ("resume", "n0"),
    "evict": ("evict", "policy", "--replica", "a"),
}
# of manifests, keys, checkpoints, this machine, or a page: no daemon's word is in them, except as an error (below)
OFFLINE = {
    "config",
    "dashboard",
    "demo",
    "docs",
    "doctor",
    "explain",
    "keygen",
    "publish",
    "save",
    "simulate",
    "support-bundle",
}


def test_table_has_every_command():
    assert ASKED.keys() | OFFLINE == COMMANDS.keys()


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("command", ASKED)
def test_hostile_names_and_reasons_are_printed_as_they_are_or_escaped(command: str, text: str, fails: bool) -> None:
    if command == "manifest" and text == HOSTILE["surrogate"]:
        return  # wire messages are valid Unicode, and JSON cannot contain a surrogate
    status, stdout, stderr = run(peer(text, fails=fails), *ASKED[command])
    clean, plain_out, plain_err = run(peer("~", fails=fails), *ASKED[command])
    assert status == clean
    for shown in (stdout, stderr):
        assert all(char.isprintable() for char in shown if char != "\n"), shown
    if command not in ("status", "wait", "watch", "models", "history", "swap", "rollback", "plan", "verify"):
        # only table cells may wrap, so the number of lines equals that of harmless names
        assert len(stdout.splitlines()) == len(plain_out.splitlines())
        assert len(stderr.splitlines()) == len(plain_err.splitlines())
    if text.isprintable() and (command in ("plan", "swap") and fails):
        assert text in stderr


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("command", ASKED)
def test_json_is_one_valid_object_with_the_names_as_they_are(command: str, text: str, fails: bool) -> None:
    _, stdout, _ = run(peer(text, fails=fails), *ASKED[command], "--json", is_real=False)  # states are text, too
    (line,) = stdout.split("\n")[:-1]
    assert line.isascii() and line.isprintable()
    if command != "abort" or fails:
        assert (
            text
            in json.dumps(json.loads(line), ensure_ascii=False)
            .encode("utf-8", "surrogatepass")
            .decode("utf-8", "surrogatepass")
            .replace("\\\\", "\\")
            or json.dumps(text)[1:-1] in line
        )


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    "arguments",
    [("{}",), ("swap", "{}"), ("swap", "x", "--version", "{}"), ("swap", "x", "--{}"), ("keygen", "{}"),
     ("plan", "--source", "{}", "--target", "{}"), ("explain", "{}", "--source", "{}", "--target", "{}"),
     ("manifest", "--layout", "{}"), ("history", "{}"), ("abort", "x", "--reason", "{}"),
     ("watch", "{}", "--count", "1")],
)  # fmt: skip
def test_hostile_arguments_come_back_as_plain_lines(arguments: tuple[str, ...], text: str) -> None:
    _, stdout, stderr = run(FakeClient(), *(argument.format(text) for argument in arguments))
    for shown in (stdout, stderr):
        assert all(char.isprintable() for char in shown if char != "\n")


def test_nul_in_an_argument_is_a_usage_error() -> None:
    for arguments in (("swap", "a\0b"), ("status", "--address", "a\0b"), ("keygen", "a", "--directory", "x\0y")):
        status, stdout, stderr = run(FakeClient(), *arguments)
        assert (status, stdout) == (2, "") and "holds a NUL character" in stderr and "\0" not in stderr


def test_progress_bar_has_hostile_names_escaped() -> None:
    event = SwapProgress("s", "po\x1b[31m\nlicy [red]", 3, "stage\x07")
    assert bar_fields(event)["description"] == "po\\x1b[31m\\nlicy [red] v3: stage\\x07"


# --- logs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_client_logger_and_the_processes_logs_write_one_printable_line(text: str) -> None:
    for formatter, filters in (
        (_LineFormatter(as_json=False, for_journald=False), []),
        (logging.Formatter("%(message)s"), [Escaped()]),
    ):
        out = io.StringIO()
        handler = logging.StreamHandler(out)
        handler.setFormatter(formatter)
        logger = logging.Logger("refitd.client")
        logger.addHandler(handler)
        for each in filters:
            logger.addFilter(each)
        logger.error("member=%s failed: %s", text, RefitFailed(text))
        logger.error(f"100% {text}")
        logger.info("event", extra={"fields": {"reason": text}})
        assert all(char.isprintable() for char in out.getvalue() if char != "\n")
        assert len(out.getvalue().splitlines()) == 3
        try:
            raise ValueError(text)
        except ValueError:
            logger.exception("over %s", text)
        own = out.getvalue().splitlines()[3:]
        assert len(own) > 2 and all(line.isprintable() and line.startswith("    ") for line in own[1:])


def test_stub_logs_through_the_filter() -> None:
    import refitd.client.client  # noqa: F401

    assert any(isinstance(each, Escaped) for each in logging.getLogger("refitd.client").filters)


def test_reasons_of_a_plan_keep_their_lines_and_add_none() -> None:
    error = PlanError(["a\nb: forged", "c"])
    assert str(error).split("\n") == ["a\\nb: forged", "c"]
    again = from_code("plan", str(error))
    assert isinstance(again, PlanError) and len(again.violations) == 2 and str(again) == str(error)


# --- NUL ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        local.RegisterSource(model="a\0b", rank=0, world_size=1, shard=described("w")),
        local.RegisterTarget(model="m", replica="a\0b", rank=0, world_size=1, shard=described("w")),
        local.RegisterTarget(model="m", replica="r", rank=0, world_size=1, shard=described("w\0")),
        local.StartSwap(model="caf\udce9"),
        local.Hello(protocol=PROTOCOL_VERSION, token="t", name="a\0"),
        local.CreateArena(nbytes=1, label="\0"),
    ],
)
def test_name_that_can_be_none_is_refused_by_name(message: Any) -> None:
    with pytest.raises(RefusedError, match=r"(model|replica|tensor|name|label).*(NUL character|not valid Unicode)"):
        check_names(message)


def test_nul_in_a_path_is_a_configuration_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="NUL character"):
        refitd.connect("/tmp/a\0b")
    with pytest.raises(ConfigError, match="NUL character"):
        load("/tmp/a\0b", environ={})
    file = tmp_path / "refitd.toml"
    for section, key, table in (
        ("node", "runtime_dir", ""),
        ("coordinator", "journal", ""),
        ("security", "key", ""),
        ("models.policy", "replicas", "["),
    ):
        file.write_text(f'[{section}]\n{key} = {table}"/x\\u0000y"{"]" if table else ""}\n')
        with pytest.raises(ConfigError, match=rf"{section}\.{key} .*NUL character"):
            load(file, environ={})
    file.write_text('[models."a\\u0000b"]\nverify = true\n')
    with pytest.raises(ConfigError, match="NUL character"):
        load(file, environ={})


def test_arena_may_have_any_label() -> None:
    import os

    fd = arena.create(4096, "po\0licy\x1b[31m")
    os.close(fd)


def test_flaw_lets_every_other_text_be_a_name() -> None:
    for text in (*HOSTILE.values(), "", "a" * 1000):
        assert bool(flaw(text)) == ("\udce9" in text)


@pytest.mark.parametrize("text", ["n\x1b[31m0", "n\n0", "n\u202e0"])
def test_what_an_operator_chooses_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    with pytest.raises(ConfigError, match="holds a control character"):
        load(None, environ={}, **{"node.name": text})
    with pytest.raises(ConfigError, match="holds a control character"):
        refitd.connect(f"/tmp/{text}")
