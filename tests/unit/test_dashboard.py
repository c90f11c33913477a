"""The page of `refitctl dashboard`: its contents, their order, and escaping of foreign markup."""

from __future__ import annotations

import re
import threading
from html.parser import HTMLParser

import pytest
from msgspec import structs

from refitd.errors import RefusedError, TransportError
from refitd.protocol.reports import HistoryEntry, LostNode, ReplicaName
from refitd_cli import dashboard
from refitd_cli.commands.dashboard import Latest
from refitd_cli.dashboard import Pages, Shown, fragment
from refitd_cli.html import path
from refitd_cli.opened import NOT_YET, Opened
from refitd_cli.session import Session
from tests.support.cli import ABORTED, STATUS, TARGET, FakeClient, run

SWAPS = FakeClient().history().swaps
ALLOWED = ("class", "data-label", "value", "max", "data-key", "data-source", "data-again")
HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)> " onmouseover="alert(3) &lt; \x1b[31m\u202e'


def status(*targets, **changed):
    return structs.replace(STATUS, models=(structs.replace(STATUS.models[0], targets=targets, **changed),))


class Tags(HTMLParser):
    """All tags with their attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words += data


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    table = text.partition(heading)[2].partition("</table>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr[^>]*>(<td.*?)</tr>", table)]


def test_it_shows_models_replicas_running_and_last_swaps_and_nodes():
    words = Tags(fragment(Shown(STATUS, SWAPS, 86400.0))).words
    for expected in (
        "1970-01-02 00:00:00 UTC: coordinator pid 3, up 75 s; 1 node, 1 model",
        "nothing is decided yet; complete versions: 6, 7",
        "swap s3 to version 8 runs: stage, 1 GB of 2 GB",
        "Trainer: 1 of 2 ranks",
        "1 serving",
        "committed",
    ):
        assert expected in words
    assert [row[1] for row in rows(fragment(Shown(STATUS, SWAPS, 0.0)), "Last swaps")] == ["s2", "s1"]


def test_charts_show_the_last_swaps_oldest_first_and_failures_by_colour():
    report = structs.replace(ABORTED, total_s=2.0, bytes=10**9)
    swaps = [
        HistoryEntry(f"s{n}", "policy", n, state, 0.0, report=structs.replace(report, total_s=float(n)))
        for n, state in ((3, "committed"), (2, "aborted"), (1, "committed"))
    ]
    page = fragment(Shown(STATUS, swaps, 0.0))
    time, _, _ = re.findall(r"<figure>(.*?)</figure>", page)
    assert "time: last 3.00 s, up to 3.00 s" in time
    bars = re.findall(r'<rect class="(\w*)" [^>]*height="([\d.]+)"><title>(.*?)</title>', time)
    assert [(tone, title) for tone, _, title in bars] == [
        ("", "version 1, committed: 1.00 s"),
        ("failed", "version 2, aborted: 2.00 s"),
        ("", "version 3, committed: 3.00 s"),
    ]
    assert [float(height) for _, height, _ in bars] == [16, 32, 48]
    assert "charts" not in fragment(Shown(STATUS, swaps[:1], 0.0)), "one swap is no course"


def test_the_filter_hides_rows_that_are_fine_and_no_others():
    page = fragment(Shown(STATUS, SWAPS, 0.0))
    swaps = page.partition("Last swaps")[2]
    found = re.findall(r'<tr class="(\w*)"><td[^>]*>[^<]*</td><td[^>]*>(s\d)</td>', swaps)
    assert found == [("", "s2"), ("fine", "s1")], "one is decided, one committed"


def test_who_serves_nothing_comes_first_and_then_who_lags_most():
    def replica(name, version, state="serving", **changed):
        return structs.replace(TARGET, replica=name, version=version, state=state, **changed)

    targets = (
        replica("current", 7),
        replica("late", 6, "behind"),
        replica("later", 3, "behind"),
        replica("fenced", None, "fenced"),
        replica("short", 7, world_size=2),
        replica("ahead", 9, "behind"),
        replica("wide", 7, world_size=2),
        replica("wide", 5, "behind", world_size=2, rank=1),
    )
    found = rows(fragment(Shown(status(*targets, live=7), (), 0.0)), "Replicas")
    assert [(row[0], row[1], row[2], row[3]) for row in found] == [
        ("fenced", "-", "-", "1/1"),
        ("later", "3", "4", "1/1"),
        ("ahead", "9", "-2", "1/1"),
        ("wide", "5", "2", "2/2"),
        ("late", "6", "1", "1/1"),
        ("short", "7", "0", "1/2"),
        ("current", "7", "0", "1/1"),
    ]
    assert found[3][4] == "1 behind, 1 serving"


def test_lost_nodes_their_replicas_and_failed_swaps_come_before_the_models():
    lost = LostNode("n9", "box", 9, 35.0, "silent", (ReplicaName("policy", "z"),))
    late = structs.replace(STATUS.nodes[0], node="n1", silent_s=4.0)
    shown = structs.replace(STATUS, nodes=(STATUS.nodes[0], late), lost=(lost,))
    page = fragment(Shown(shown, SWAPS, 0.0))
    assert [row[:2] for row in rows(page, "<h2>Nodes")] == [
        ["n9", "lost 35 s ago"],
        ["n1", "late: silent for 4 s"],
        ["n0", "connected"],
    ]
    assert rows(page, "<h3>Replicas")[0] == ["z", "-", "-", "-", "lost with node n9", "n9", "-"]
    assert "Failed swaps" not in page
    page = fragment(Shown(shown, (HistoryEntry("s9", "policy", 9, "incomplete", 0.0, "why"), *SWAPS), 0.0))
    assert [row[1] for row in rows(page, "<h2>Failed swaps")] == ["s9"]
    assert page.index("Failed swaps") < page.index("<h2>policy")


def test_texts_of_others_are_no_markup():
    target = structs.replace(TARGET, replica=HOSTILE, node=HOSTILE)
    model = structs.replace(STATUS.models[0], model=HOSTILE, targets=(target,))
    node = structs.replace(STATUS.nodes[0], node=HOSTILE, host=HOSTILE, problems=(HOSTILE,))
    shown = structs.replace(STATUS, models=(model,), nodes=(node,))
    entry = HistoryEntry(HOSTILE, HOSTILE, 1, "aborted", 0.0, HOSTILE, structs.replace(ABORTED, kind=HOSTILE))
    found = Tags(fragment(Shown(shown, (entry,), 0.0, HOSTILE)))
    plain = Tags(fragment(Shown(STATUS, (SWAPS[1],), 0.0, "away")))
    assert {tag for tag, _ in found.tags} <= {tag for tag, _ in plain.tags} | {"p"}
    assert {name for _, given in found.tags for name in given} <= {*ALLOWED}
    assert found.words.count("<script>alert(1)</script>") == 18
    assert all(char.isprintable() or char == "\n" for char in found.words)


def test_long_tables_are_cut_and_counted():
    targets = tuple(structs.replace(TARGET, replica=f"r{n:04}") for n in range(dashboard.MAX_ROWS + 5))
    text = fragment(Shown(status(*targets), (), 0.0))
    assert len(rows(text, "Replicas")) == dashboard.MAX_ROWS
    assert "and 5 more" in text


def test_the_page_allows_its_own_script_and_style_and_nothing_else():
    page = Pages(lambda: Shown(STATUS, SWAPS, 0.0), Opened())["/"]()
    text = page.body.decode()
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert f"{directive} {dashboard._allowed(inside)}" in page.policy
    assert "http" not in text.replace("http-equiv", ""), "nothing comes from elsewhere"
    assert {tag for tag, _ in Tags(text).tags} & {"link", "img", "iframe"} == set()


class Flaky(FakeClient):
    away = False

    def status(self):
        if self.away:
            raise TransportError("no coordinator answers")
        return super().status()


def test_a_daemon_that_is_away_leaves_what_was_shown_and_says_so():
    client = Flaky()
    latest = Latest(Session(lambda _: client))
    latest.refresh()
    first = latest.shown
    client.away = True
    latest.refresh()
    assert (latest.shown.status, latest.shown.at) == (first.status, first.at)
    assert latest.shown.problem == "no coordinator answers" and client.closed
    assert "No answer since" in fragment(latest.shown) and "serving" in fragment(latest.shown)
    client.away = False
    latest.refresh()
    assert latest.shown.problem == ""


def test_the_page_starts_while_no_daemon_answers():
    client = Flaky()
    client.away = True
    latest = Latest(Session(lambda _: client))
    latest.refresh()
    assert "No answer yet; tried at" in fragment(latest.shown) and "no coordinator answers" in fragment(latest.shown)
    client.away = False
    latest.refresh()
    assert "serving" in fragment(latest.shown) and "No answer" not in fragment(latest.shown)
    client.status_result = RefusedError("not admitted")
    with pytest.raises(RefusedError):
        Latest(Session(lambda _: client)).refresh()


def test_a_plan_that_takes_long_does_not_keep_the_status_from_being_asked():
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(FakeClient):
        def plan(self, model):
            begun.set()
            assert goes_on.wait(30)
            return super().plan(model)

    latest = Latest(Session(lambda _: Slow()))
    where = path("plan", "policy", "v")
    latest.opened.part(where)
    latest.refresh()
    assert begun.wait(30)
    first = latest.shown
    latest.refresh()
    assert latest.shown is not first and latest.opened.part(where) == (NOT_YET, False)
    goes_on.set()
    latest.close()
    assert (latest.opened.part(where) or ("", False))[1]


def test_a_program_that_may_not_ask_ends_with_the_reason():
    ran = run(RefusedError("the daemon belongs to another user"), "dashboard")
    assert (ran.status, ran.stdout, ran.stderr) == (1, "", "refitctl: the daemon belongs to another user\n")


def test_an_empty_cluster_has_a_page():
    text = fragment(Shown(structs.replace(STATUS, nodes=(), models=()), (), 0.0))
    assert "No models" in text and "none" in text
