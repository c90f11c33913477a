"""Plans and traces on the dashboard's page: they are fetched when opened, and foreign markup is escaped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from msgspec import structs

from refitd.errors import DeadlineExceeded, PlanError, TransportError
from refitd.protocol.plan_reports import PairTraffic
from refitd.protocol.reports import NodeTrace, TraceSpan
from refitd_cli import opened
from refitd_cli import opened as timeline
from refitd_cli.dashboard import Pages, Shown, fragment
from refitd_cli.heatmap import plan_map
from refitd_cli.html import path, words_of
from tests.support.cli import PLAN, SOURCE, STATUS, TARGET, TRACE, FakeClient

MODEL = STATUS.models[0]
HOSTILE = '<script>alert(1)</script>" onload="x \x1b[31m\u202e'


class Client(FakeClient):
    """A client that returns `plans` and `traces`, or raises them."""

    given: object = None

    def plan(self, model):
        self.asked.append(("plan", model))
        return self._or(PLAN)

    def trace(self, model, swap=""):
        self.asked.append(("trace", model, swap))
        return self._or(TRACE)

    def _or(self, usual):
        if isinstance(self.given, Exception):
            raise self.given
        return self.given or usual


def tree(text: str) -> ET.Element:
    return ET.fromstring(f"<x>{text}</x>")


def inside(text: str) -> str:
    return " ".join(tree(text).itertext())


# --- what is asked, and when --------------------------------------------------------------------------------


def test_nothing_is_asked_until_somebody_opens_it_and_then_once():
    found, client = opened.Opened(), Client()
    shown = Shown(STATUS, FakeClient().history().swaps, 0.0)
    pages = Pages(lambda: shown, found)
    sources = re.findall(r'data-source="([^"]*)"', fragment(shown))
    assert [words_of(source)[:2] for source in sources] == [
        ("running", "policy"),
        ("plan", "policy"),
        ("trace", "policy"),
    ]
    found.ask(client, STATUS)
    assert not client.asked
    assert [pages[source]().status for source in sources] == [200, 503, 503]  # fetched even if closed: it changes
    found.ask(client, STATUS)
    assert {kind for kind, *_ in client.asked} == {"trace", "plan"} and len(client.asked) == 3
    client.asked.clear()
    assert [pages[source]().status for source in sources] == [200, 200, 200]
    assert all(b"asking" not in pages[source]().body for source in sources)
    found.ask(client, STATUS)
    assert client.asked == [("trace", "policy", "s3")], "only what changes is asked for again"


@pytest.mark.parametrize(
    "given", ["/", "/plan", "/plan/=m", "/plan/m/v", "/plan/=m/=v/=w", "/other/=m/=v", "plan/=m/=v"]
)
def test_other_paths_are_no_pages(given):
    found = opened.Opened()
    assert found.part(given) is None
    pages = Pages(lambda: Shown(STATUS, (), 0.0), found)
    assert (pages.get(given) is not None) == (given == "/")
    assert list(pages) == ["/", "/now"] and len(pages) == 2


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a=b", "?x#y", "%2e", "ü \u202e", HOSTILE])
def test_any_name_has_a_path_of_its_own(name):
    made = path("trace", name, "s")
    assert words_of(made) == ("trace", name, "s")
    assert re.fullmatch(r"/trace/=[\w.%~-]*/=s", made, re.ASCII)


def test_what_is_refused_is_shown_and_asked_for_again():
    found, client = opened.Opened(), Client()
    client.given = PlanError(["w: 4 elements are <missing>"])
    where = path("plan", "policy", "v")
    assert found.part(where) == (opened.NOT_YET, False)
    found.ask(client, STATUS)
    text, stays = found.part(where) or ("", True)
    assert "4 elements are &lt;missing&gt;" in text and not stays
    client.given = None
    found.ask(client, STATUS)
    assert (found.part(where) or ("", False))[1]
    gone = path("plan", "gone", "v")
    found.part(gone)
    found.ask(client, STATUS)
    assert "no longer registered" in (found.part(gone) or ("",))[0]
    found.part(path("trace", "policy", "s9"))
    client.given = DeadlineExceeded("no plan within 120 s")
    found.ask(client, STATUS)
    assert "no plan within" in (found.part(path("trace", "policy", "s9")) or ("",))[0]
    client.given = TransportError("away")
    with pytest.raises(TransportError):
        found.ask(client, STATUS)


def test_what_is_kept_and_what_is_asked_at_a_time_is_limited():
    found, client = opened.Opened(), Client()
    for number in range(10 * opened.MAX_KEPT):
        found.part(path("trace", "policy", str(number)))
    found.ask(client, STATUS)
    assert len(client.asked) == opened.MAX_ASKED
    for _ in range(opened.MAX_KEPT):
        found.ask(client, STATUS)
    assert len(client.asked) == opened.MAX_KEPT
    for number in range(10 * opened.MAX_KEPT):
        found.part(path("plan", "policy", str(number)))
        found.ask(client, STATUS)
    assert len(found._found) == opened.MAX_KEPT


def test_a_plan_has_another_path_once_other_ranks_are_registered():
    def source(*targets):
        model = structs.replace(MODEL, targets=targets)
        shown = Shown(structs.replace(STATUS, models=(model,)), (), 0.0)
        return re.findall(r'data-key="plan policy" data-source="([^"]*)"', fragment(shown))

    assert source(TARGET) == source(structs.replace(TARGET, version=9, state="behind")) != []
    assert source(TARGET) != source(structs.replace(TARGET, pid=41))
    assert source() == [], "there is no plan without targets"


# --- the heat map -------------------------------------------------------------------------------------------


def test_both_ends_of_the_map_are_named_by_their_own_ranks():
    sources = tuple(structs.replace(SOURCE, rank=rank) for rank in (0, 1))
    targets = tuple(structs.replace(TARGET, replica=name, rank=rank) for name in ("b", "source") for rank in (0, 1, 3))
    pairs = (
        PairTraffic("source rank 0", "b rank 3", 100, 1),
        PairTraffic("source rank 1", "source rank 0", 400, 1),
        PairTraffic("source rank 1", "new rank 5", 25, 1),
    )
    text = plan_map(structs.replace(PLAN, pairs=pairs), structs.replace(MODEL, sources=sources, targets=targets))
    texts = [found.text for found in tree(text).iter("text")]
    assert texts[:2] == ["0", "1"]
    assert texts[2:] == ["b 0", "b 1", "b 3", "new 5", "source 0", "source 1", "source 3"]
    titles = [found.text for found in tree(text).iter("title")]
    assert titles == [
        "0 on n0 to b 3 on n0: 100 B (100 bytes)",
        "1 on n0 to new 5: 25 B (25 bytes)",
        "1 on n0 to source 0 on n0: 400 B (400 bytes)",
    ]
    assert "source rank 1 to source rank 0: 400 B" in inside(text)


def test_a_map_of_thousands_of_ranks_is_grouped_and_bounded():
    sources = tuple(structs.replace(SOURCE, rank=rank, node=f"n{rank // 8}") for rank in range(512))
    targets = tuple(
        structs.replace(TARGET, replica=f"r{n}", rank=rank, node=f"m{n}") for n in range(100) for rank in range(8)
    )
    pairs = tuple(PairTraffic(f"source rank {n % 512}", f"r{n % 100} rank {n % 8}", n, 1) for n in range(5000))
    text = plan_map(structs.replace(PLAN, pairs=pairs), structs.replace(MODEL, sources=sources, targets=targets))
    assert len(list(tree(text).iter("rect"))) <= 48 * 48 + 1
    assert "and 4995 more pairs" in text and len(text) < 1_000_000


def test_names_in_map_and_trace_are_no_markup():
    model = structs.replace(MODEL, targets=(structs.replace(TARGET, replica=HOSTILE, node=HOSTILE),))
    plan = structs.replace(PLAN, model=HOSTILE, pairs=(PairTraffic("source rank 0", f"{HOSTILE} rank 0", 9, 1),))
    span = TraceSpan(HOSTILE, HOSTILE, 0.0, 1.0, note=HOSTILE)
    trace = structs.replace(
        TRACE, swap=HOSTILE, missing=(HOSTILE,), nodes=(NodeTrace("t", HOSTILE, "h", (span,), 1, 50.0, 0.0),)
    )
    for text in (plan_map(plan, model), timeline.timeline(trace)):
        names = {name for one in tree(text).iter() for name in one.attrib}
        assert not {name for name in names if name.startswith("on")} and "script" not in {
            e.tag for e in tree(text).iter()
        }
        assert "<script>alert(1)</script>" in inside(text)
        assert all(char.isprintable() or char == "\n" for char in inside(text))


def test_a_plan_that_moves_nothing_says_so():
    assert "no data would move" in plan_map(structs.replace(PLAN, pairs=()), MODEL)


# --- the trace ----------------------------------------------------------------------------------------------


def test_bars_lie_where_things_happened_in_the_coordinator_s_time():
    text = timeline.timeline(TRACE)
    words = inside(text)
    assert "250.0 ms from left to right; clocks agree within 500 us" in words
    assert "stage: 250.0 ms" in words and "copy: 200.0 ms, 64 B (n)" in words and "stage: 200.0 ms, not ended" in words
    assert "node n1: its clock is not aligned, so its bars are not shown" in words
    assert "node n0: 2 spans were too many" in words and "node n2 is lost" in words
    bars = [(one.get("x"), one.get("width"), one.get("class")) for one in tree(text).iter("rect")]
    assert bars == [("0.0", "1000.0", ""), ("40.0", "800.0", "failed")]


@pytest.mark.parametrize("offset_s", [1e12, -1e12])
def test_an_absurd_clock_stays_within_the_drawing(offset_s):
    spans = (TraceSpan("d", "x", 5.0, 4.0), TraceSpan("d", "y", 0.0, 1e11))
    text = timeline.timeline(structs.replace(TRACE, nodes=(NodeTrace("t", "n", "h", spans, 0, offset_s, 0.0),)))
    for bar in tree(text).iter("rect"):
        x, width = float(bar.get("x") or -1), float(bar.get("width") or -1)
        assert x >= 0 and width > 0 and x + width <= 1000.1


def test_many_spans_are_counted():
    spans = tuple(TraceSpan("w", "chunks", 0.0, 0.1) for _ in range(500))
    rows = tuple(TraceSpan(f"w{n}", "copy", 0.0, 0.1) for n in range(500))
    text = timeline.timeline(structs.replace(TRACE, nodes=(NodeTrace("t", "n", "h", spans + rows, 0, 50.0, 0.0),)))
    assert len(list(tree(text).iter("rect"))) <= timeline.MAX_ROWS + timeline.MAX_BARS
    assert "chunks x500" in text and re.search(r"and \d+ more rows", text)


def test_a_swap_that_has_just_begun_has_a_trace():
    assert "coordinator" not in timeline.timeline(structs.replace(TRACE, phases=(), nodes=(), missing=()))
