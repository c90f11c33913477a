"""`refitctl dashboard` of a real daemon, and its page in a real browser."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

import refitd
from refitd.metrics import HttpServer, Page
from refitd.protocol.plan_reports import PairTraffic
from refitd.testing import Daemon, eventually
from refitd_cli.dashboard import Pages, Shown
from refitd_cli.opened import Opened
from tests.support.browser import CHROMIUM, chromium
from tests.support.cli import PLAN, STATUS, TARGET, FakeClient
from tests.support.fleet import go_live
from tests.support.programs import ended

HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"


@pytest.mark.slow
def test_the_page_of_a_daemon_is_served_until_ctrl_c(shared_daemon: Daemon) -> None:
    command = [sys.executable, "-m", "refitd_cli.control", "dashboard", "--port", "0", "--interval", "0.2"]
    command += ["--address", str(shared_daemon.directory)]
    with shared_daemon.connect("trainer") as trainer, shared_daemon.connect("engine") as engine:
        source = trainer.register_source("shown", {"w": torch.ones(8)})
        target = engine.register_target("shown", {"w": torch.zeros(8)}, replica="engine-a")
        swap = go_live(trainer, source, 1, target, model="shown").swap
        with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            for path in ("", "now"):
                text, policy = got(url + path)
                assert "default-src 'none'" in policy
                assert "engine-a" in text and swap in text and "1 serving" in text
            plan, trace = re.findall(r'data-source="/((?:plan|trace)/[^"]*)"', text)
            assert "<title>0 on " in opened(url + plan) and "engine-a rank 0: 32 B" in opened(url + plan)
            assert "copy, compared: " in opened(url + trace)
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(urllib.request.Request(url, headers={"Host": "evil.example"}), timeout=60)
            taken = subprocess.run(
                [*command[:5], url.split(":")[2].strip("/"), *command[6:]], capture_output=True, text=True, check=False
            )
            assert taken.returncode == 1 and "cannot be listened on" in taken.stderr
            process.send_signal(signal.SIGINT)
            assert process.wait(10) in (0, 130)
        target.close()
        source.close()


@pytest.mark.slow
def test_names_that_are_markup_or_obeyed_by_terminals_are_shown_as_text(start_daemon: Callable[..., Daemon]) -> None:
    evil = HOSTILE  # the daemon refuses names with control characters
    names = ("policy", evil, "m" * 100 + evil)
    daemon = start_daemon(environment={"REFITD_NODE__NAME": "n<b>&'\"" * 8})
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        for model in names:
            source = trainer.register_source(model, {"w": torch.ones(8)})
            targets = [engine.register_target(model, {"w": torch.zeros(8)}, replica=replica) for replica in names]
            go_live(trainer, source, 1, *targets, model=model)
        with pytest.raises(refitd.RefusedError, match="together, at most 480"):
            trainer.register_target("m" * 300, {"w": torch.zeros(8)}, replica="r" * 200)
        for columns in (80, 60):
            shown = on_terminal(daemon, columns, "watch", "--count", "2", "--interval", "0.2")
            assert not re.search("\x1b\\]|\x07|\u202e|\x1b\\[31mowned", shown)
            lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", re.sub(r"\x1b\[\d*A", "\n", shown)).splitlines()
            assert max(map(len, lines)) <= columns and sum("serving" in line for line in lines) >= 9
        command = [sys.executable, "-m", "refitd_cli.control", "dashboard", "--port", "0", "--address"]
        with ended(subprocess.Popen([*command, str(daemon.directory)], stdout=subprocess.PIPE, text=True)) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            text, _ = got(url)
            assert "<b>" not in text and "<img" not in text and text.count("<script") == 1 and "\x1b" not in text
            if CHROMIUM is not None:
                found = chromium(url, "--dump-dom")
                assert "<title>refitd</title>" in found and "<img" not in found


def on_terminal(daemon: Daemon, columns: int, *words: str) -> str:
    """Return the output of a command on a terminal of 24 lines."""
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command = [sys.executable, "-m", "refitd_cli.control", *words, "--address", str(daemon.directory)]
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        with ended(subprocess.Popen(command, stdout=theirs, stdin=theirs, env={**environment, "TERM": "xterm"})):
            os.close(theirs)
            found = b""
            with contextlib.suppress(OSError):  # the other end is closed
                while more := terminal.read(1 << 16):
                    found += more
    return found.decode()


def got(url: str) -> tuple[str, str]:
    """Return a page and its content security policy."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode(), answer.headers["Content-Security-Policy"]


def opened(url: str) -> str:
    """Return a section of the page when the cluster's answer is in it."""
    found = []

    def there() -> bool:
        with contextlib.suppress(urllib.error.HTTPError):
            found.append(got(url)[0])
        return bool(found)

    eventually(there, f"{url} is there")
    return found[0]


class AllOpen(Pages):
    """The page with every collapsible element opened."""

    def __getitem__(self, path: str) -> Callable[[], Page]:
        make = super().__getitem__(path)
        return lambda: replace(make(), body=make().body.replace(b"<details ", b"<details open "))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian: apt-get install chromium)")
def test_a_browser_shows_it_and_keeps_it_fresh_and_runs_nothing_of_others(tmp_path: Path) -> None:
    target = structs.replace(TARGET, replica=HOSTILE)
    model = structs.replace(STATUS.models[0], model=HOSTILE, targets=(target,))
    status, numbers, parts = structs.replace(STATUS, models=(model,)), itertools.count(), Opened()
    swaps = tuple(structs.replace(one, swap=HOSTILE, model=HOSTILE) for one in FakeClient().history().swaps)
    client = FakeClient(
        plan_result=structs.replace(
            PLAN, model=HOSTILE, pairs=(PairTraffic("source rank 0", f"{HOSTILE} rank 0", 9, 1),)
        )
    )

    def shown() -> Shown:
        parts.ask(client, status)  # type: ignore[arg-type]
        return Shown(status, swaps, 0.0, f"question {next(numbers)}")

    server = HttpServer(("127.0.0.1", 0), (), AllOpen(shown, parts), "--port")
    try:
        url = f"http://127.0.0.1:{server.address[1]}/"
        found = chromium(url, "--dump-dom")
        assert "<title>refitd</title>" in found, "a name has run"
        assert int(re.findall(r"question (\d+)", found)[0]) >= 1, "the page has not been refreshed"
        assert found.count("<script>") == 1 and "<img" not in found
        assert found.count('<rect class="failed"') == 2, "the running swap and the last one have bars"
        assert 'class="map"' in found and "asking the cluster" not in found
        assert re.search(r'id="late" class="bad" hidden', found)
        for width, scheme in ((1200, "light"), (390, "dark")):
            picture = tmp_path / f"{scheme}.png"
            dark = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0") if scheme == "dark" else ()
            chromium(url, f"--screenshot={picture}", f"--window-size={width},1400", "--hide-scrollbars", *dark)
            assert picture.stat().st_size > 10_000
    finally:
        server.close()
