"""The contract of journals, for a sqlite file and for etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest

from refitd.coordinator import journals
from refitd.coordinator.journals import Drain, Journal, KnownNode, LiveVersion, Recovered, SwapRecord
from refitd.coordinator.journals.etcd import EtcdJournal
from refitd.coordinator.journals.file import FileJournal
from refitd.errors import CommitError
from refitd.protocol.reports import LostNode
from tests.support import etcd

DECIDED = SwapRecord("s1", "policy", 4, "decided", "plan", "", 1.0, b'{"a":"\xc3\xbc"}', "r")


@dataclass
class Kept:
    """One journal, opened by successive processes of a coordinator."""

    _open: Callable[[], Journal]
    _ended: Callable[[Journal], None]
    life: Journal

    def next_life(self) -> Journal:
        """End the process without closing anything in order, and open the journal in another one."""
        self._ended(self.life)
        self.life = self._open()
        return self.life

    def both(self) -> Iterator[Journal]:
        """Yield this process's journal, then that of the next one."""
        yield self.life
        yield self.next_life()


@pytest.fixture(scope="module")
def server() -> Iterator[etcd.Etcd]:
    with etcd.Etcd() as found:
        yield found


_numbers = count()


@pytest.fixture(
    params=["file", pytest.param("etcd", marks=pytest.mark.skipif(bool(etcd.MISSING), reason=etcd.MISSING))]
)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    def ended(journal: Journal) -> None:
        if isinstance(journal, FileJournal):
            journal._unlock()
        elif isinstance(journal, EtcdJournal):
            journal._lead.release()  # as etcd does in some seconds

    if request.param == "file":
        path = tmp_path / "dir" / "journal.sqlite"
        found = Kept(lambda: FileJournal(path), ended, FileJournal(path))
    else:
        place = request.getfixturevalue("server").place(f"/test/{next(_numbers)}")
        found = Kept(lambda: etcd.journal(place), ended, etcd.journal(place))
    yield found
    found.life.close()


def test_a_decision_is_found_by_the_next_life(kept: Kept) -> None:
    assert kept.life.is_new
    kept.life.write(DECIDED)
    identity = kept.life.id
    found = kept.next_life()
    assert found.decided("s1") == DECIDED and found.recent("", 9) == [DECIDED]
    assert found.live("policy") == LiveVersion(4, "r", 1, "s1")
    assert not found.is_new and found.id == identity


def test_an_aborted_swap_was_not_decided(kept: Kept) -> None:
    kept.life.write(SwapRecord("s1", "policy", 4, "aborted", "", "worker died", 1.0))
    for journal in kept.both():
        assert journal.decided("s1") is None and journal.decided("unknown") is None
        assert journal.tried("policy") == (4, "") and journal.live("policy") is None


def test_recent_swaps_come_newest_first_of_one_model_or_all(kept: Kept) -> None:
    kept.life.write(DECIDED)
    kept.life.write(SwapRecord("s2", "other", 1, "aborted", "", "no", 2.0))
    kept.life.write(replace(DECIDED, state="committed", report=b"{}"))
    for journal in kept.both():
        assert [(r.swap, r.state, r.is_decided) for r in journal.recent("", 5)] == [
            ("s1", "committed", True),
            ("s2", "aborted", False),
        ]
        assert [r.swap for r in journal.recent("policy", 5)] == ["s1"]
        assert [r.swap for r in journal.recent("", 1)] == ["s1"]


def test_several_decisions_are_written_together_or_not_at_all(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    together = [replace(DECIDED, swap=f"s{i}", model=f"m{i}") for i in range(20)]
    assert kept.life.write(*together) == list(range(1, 21))
    insert = kept.life._insert

    def refuse_the_last(record: SwapRecord) -> int:
        if record.model == "last":
            raise CommitError("full")
        return insert(record)

    monkeypatch.setattr(kept.life, "_insert", refuse_the_last)
    with pytest.raises(CommitError):
        kept.life.write(*(replace(r, version=9) for r in together), replace(DECIDED, model="last"))
    for journal in kept.both():
        assert [journal.live(r.model) for r in together] == [
            LiveVersion(4, "r", i + 1, r.swap) for i, r in enumerate(together)
        ]
        assert journal.live("last") is None


def test_what_cannot_be_written_is_written_before_anything_later(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: SwapRecord) -> None:
        raise CommitError("full")

    journal = kept.life
    journal.write(DECIDED)
    with monkeypatch.context() as disk:
        disk.setattr(journal, "_insert", full)
        for ended in (replace(DECIDED, state="committed"), SwapRecord("s2", "policy", 5, "aborted", "", "no", 2.0)):
            with pytest.raises(CommitError):
                journal.note(ended)
        with pytest.raises(CommitError):
            journal.write(replace(DECIDED, swap="s3", version=6))
    journal.write(replace(DECIDED, swap="s4", version=7))
    for found in kept.both():
        swaps = [(r.swap, r.state) for r in found.recent("policy", 9)]
        assert swaps == [("s4", "decided"), ("s2", "aborted"), ("s1", "committed")]


def test_a_journal_keeps_the_last_swaps_only(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(kept.life), "kept", 3)
    for number in range(12):
        kept.life.write(SwapRecord(f"s{number}", "policy", number, "decided", "", "", 1.0))
        kept.life.write(SwapRecord(f"s{number}", "policy", number, "committed", "", "", 1.0))
    for journal in kept.both():
        found = [r.version for r in journal.recent("", 100)]
        assert found[:3] == [11, 10, 9] and len(found) <= 6


@pytest.mark.parametrize("state", ["aborted", "committed"])
def test_no_number_of_swaps_makes_a_journal_forget_what_is_live_and_what_was(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(type(kept.life), "kept", 3)
    for number in (3, 4, 3):  # 4 is rolled back
        kept.life.write(SwapRecord(f"v{number}", "policy", number, "decided", "", "", 1.0, run="x"))
    for number in range(15):
        model = "policy" if state == "aborted" else "other"
        if state == "committed":
            kept.life.write(SwapRecord(f"s{number}", model, number, "decided", "", "", 1.0, run="y"))
        kept.life.note(SwapRecord(f"s{number}", model, 9, state, "", "", 1.0, run="x"))
    journal = kept.next_life()
    assert journal.live("policy") == LiveVersion(3, "x", 3, "v3")
    assert journal.highest("policy") == 4 and journal.before("policy", 4) == LiveVersion(3, "x", 3)
    assert journal.tried("policy") == ((9, "x") if state == "aborted" else (-1, ""))


def test_versions_of_long_ago_are_forgotten_of_every_model(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(kept.life), "kept", 3)
    monkeypatch.setattr(journals, "FORGET_EVERY", 10)  # an even one: decisions on two models alternate
    for number in range(40):
        kept.life.write(SwapRecord(f"s{number}", f"m{number % 2}", number, "decided", "", "", 1.0))
    for journal in kept.both():
        assert journal.before("m1", 39) == LiveVersion(37, "", 38)
        assert journal.before("m0", 32) is None is journal.before("m1", 33)
        live = journal.live("m0"), journal.live("m1")
        assert [one.version for one in live if one is not None] == [38, 39]


def test_what_daemons_knew_is_written_and_later_decisions_count_on_from_it(kept: Kept) -> None:
    kept.life.note(Recovered("policy", LiveVersion(5, "x", 40, "s9"), "old", 1.0, highest=7))
    for journal in kept.both():
        assert journal.live("policy") == LiveVersion(5, "x", 40, "s9") and journal.highest("policy") == 7
        assert journal.continues("old") and journal.continues(journal.id) and not journal.continues("other")
    journal.write(replace(DECIDED, version=8, run="y"))
    assert kept.next_life().live("policy") == LiveVersion(8, "y", 41, "s1")


def test_drains_are_kept_until_they_end(kept: Kept) -> None:
    kept.life.set_drain(Drain("n1", frozenset({("m", "a"), ("m", "ü/x")})), 1.0)
    kept.life.set_drain(Drain("n2", frozenset()), 1.0)
    kept.life.set_drain(Drain("n2", None), 2.0)
    assert kept.next_life().drained() == {"n1": frozenset({("m", "a"), ("m", "ü/x")})}


@pytest.mark.parametrize("name", ["with/slash", "ü" * 60, '["q"]', "a b", "{}", "\\u0041"])
def test_models_may_have_any_name(kept: Kept, name: str) -> None:
    kept.life.write(replace(DECIDED, model=name), replace(DECIDED, swap="s2", model=f"{name}/"))
    journal = kept.next_life()
    assert journal.live(name) == LiveVersion(4, "r", 1, "s1")
    assert journal.live(f"{name}/") == LiveVersion(4, "r", 2, "s2")


def test_known_nodes_are_found_by_the_next_life_until_they_are_forgotten(kept: Kept) -> None:
    nodes = [
        KnownNode(n, LostNode(n, "box", 7, 0.0, why), at) for n, why, at in (("n0", "silent", 2.0), ("n1", "", 1.0))
    ]
    for node in (*nodes, KnownNode("n2", None)):
        kept.life.note(node)
    for journal in kept.both():
        journal.flush()
        assert journal.nodes() == nodes[::-1]
    kept.life.note(KnownNode("n0", None))
    for journal in kept.both():
        journal.flush()
        assert journal.nodes() == nodes[1:]
