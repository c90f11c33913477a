"""refitctl watch: refreshes, waits for a daemon, and draws running swaps."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import dataclass, field

import pytest
from msgspec import structs
from rich.console import Console

from refitd.errors import PeerLost, RefitdError, RefusedError, TransportError
from refitd.protocol.reports import StatusReport
from refitd_cli.commands.watch import Screen
from tests.support.cli import STATUS, FakeClient, Ran, answer, run


@dataclass
class Restarted(FakeClient):
    """Its status is what the script says next, and after its end the last of it."""

    script: list[StatusReport | RefitdError] = field(default_factory=list)

    def status(self):
        return answer(self.script.pop(0) if len(self.script) > 1 else self.script[0])

    def connects(self) -> int:
        return sum(what == "connect" for what, *_ in self.asked)


def watch(client: FakeClient, *arguments: str) -> Ran:
    return run(client, "watch", "--interval", "0.1", *arguments)


def test_watch_prints_what_status_prints_at_every_refresh():
    client = Restarted(script=[STATUS])
    ran = watch(client, "--count", "3")
    assert (ran.status, ran.stderr, client.connects(), client.closed) == (0, "", 1, True)
    once = run(FakeClient(), "status").stdout
    assert ran.stdout.count(once) == 3


def test_watch_prints_an_object_a_line():
    later = structs.replace(STATUS, uptime_s=76.0)
    ran = watch(Restarted(script=[STATUS, later]), "--count", "2", "--json")
    objects = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [found["uptime_s"] for found in objects] == [75.0, 76.0]
    assert objects[0] == run(FakeClient(), "status", "--json").object


def test_watch_of_a_model_leaves_the_others_out():
    draft = structs.replace(STATUS.models[0], model="draft")
    both = structs.replace(STATUS, models=(*STATUS.models, draft))
    (found,) = (json.loads(watch(FakeClient(status_result=both), "draft", "--count", "1", "--json").stdout),)
    assert [model["model"] for model in found["models"]] == ["draft"]
    assert [(link["model"], link["source"]) for link in found["links"]] == [("draft", "n1")]
    assert "no model 'drift'" in watch(FakeClient(status_result=both), "drift", "--count", "1").stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_watch_waits_for_a_daemon_that_is_restarted(options):
    gone = PeerLost("the refitd daemon of node n0 has ended")
    client = Restarted(script=[STATUS, gone, gone, TransportError("no daemon runs"), STATUS, gone, STATUS])
    ran = watch(client, "--count", "3", *options)
    assert (ran.status, client.connects()) == (0, 5)
    assert ran.stderr == 2 * "waiting for the daemon: the refitd daemon of node n0 has ended\n"
    if options:
        assert len([json.loads(line) for line in ran.stdout.splitlines()]) == 3


def test_watch_gives_up_on_a_daemon_that_stays_away():
    started = time.monotonic()
    ran = watch(Restarted(script=[STATUS, PeerLost("it has ended")]), "--wait", "0.3", "--json")
    assert time.monotonic() - started < 10
    status, error = map(json.loads, ran.stdout.splitlines())
    assert (ran.status, status["coordinator_pid"], error["error"]["code"]) == (1, 3, "transport")
    assert error["error"]["message"] == "the daemon has not come back within 0.3 s: it has ended"


def test_watch_ends_with_any_other_error():
    ran = watch(Restarted(script=[STATUS, RefusedError("not you")]))
    assert (ran.status, ran.stderr) == (1, "refitctl: not you\n")


def test_ctrl_c_is_how_a_watch_ends():
    client = Restarted(script=[STATUS, KeyboardInterrupt()])
    assert (watch(client).status, client.closed) == (0, True)


def test_watch_on_a_terminal_draws_bars_of_running_swaps_until_they_end():
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=True, width=160, height=50), None, 1.0)

    def drawn() -> str:
        text = out.getvalue()
        out.seek(0)
        out.truncate()
        return text

    idle = structs.replace(STATUS, models=(structs.replace(STATUS.models[0], swap=None),))
    with screen.live:
        screen.show(STATUS)
        text = drawn()
        assert all(word in text for word in ("policy v8: stage", "1.0/2.0 GB", "serving"))
        assert "?" not in re.sub(r"\x1b\[[?\d;]*\w", "", text)
        screen.show(idle)
        text = drawn()
        assert "serving" in text
        assert "policy v8" not in text
        screen.show(STATUS)
        drawn()
        screen.wait(TransportError("it has ended [again]"))
        text = drawn()
        assert "waiting for the daemon: it has ended [again]" in text
        assert "serving" in text
        assert "policy v8" not in text
