"""The journal in etcd: only one writer, lost answers are resolved, and an unfit journal is not continued."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest

from refitd.config import EtcdConfig, EtcdPlace
from refitd.coordinator.journals import LeadLost, LiveVersion, SwapRecord
from refitd.coordinator.journals import etcd as lead_module
from refitd.coordinator.journals import gateway as gateway_module
from refitd.coordinator.journals.etcd import LEASE_S, EtcdJournal, Lead, boot_clock, check_place
from refitd.coordinator.journals.gateway import Gateway, Json, NotReached, Refused
from refitd.errors import CommitError
from refitd.testing.daemon import free_port
from tests.support import etcd

pytestmark = pytest.mark.skipif(bool(etcd.MISSING), reason=etcd.MISSING)

DECIDED = SwapRecord("s1", "policy", 4, "decided", "plan", "", 1.0, b"{}", "r")
_numbers = count()


@pytest.fixture(scope="module")
def server() -> Iterator[etcd.Etcd]:
    with etcd.Etcd() as found:
        yield found


@pytest.fixture
def place(server: etcd.Etcd) -> EtcdPlace:
    return server.place(f"/test/{next(_numbers)}")


class Line(Gateway):
    """A proxy to etcd that loses requests or answers of transactions on demand."""

    fate = ""  # "request": none arrives; "answer": etcd has carried it out; "first answer": of one try only

    def _try(self, member: tuple[str, int], what: str, body: Json, within_s: float) -> Json:
        fate, Line.fate = Line.fate, "" if Line.fate == "first answer" else Line.fate
        if what != "kv/txn" or not fate:
            return super()._try(member, what, body, within_s)
        if fate != "request":
            super()._try(member, what, body, within_s)
        raise gateway_module._Failed("no answer in time", sent=True)


@pytest.fixture
def line(place: EtcdPlace, monkeypatch: pytest.MonkeyPatch) -> Iterator[EtcdJournal]:
    monkeypatch.setattr(Line, "fate", "")
    monkeypatch.setattr("refitd.coordinator.journals.etcd.WRITE_S", 0.3)
    found = Lead(Line(place, EtcdConfig()), place, "ipc:///test")
    assert not found.attempt()
    journal = EtcdJournal(found, place, "")
    yield journal
    Line.fate = ""
    journal.close()


class Clock:
    """A clock that a test turns on."""

    ahead = 0.0

    def __call__(self) -> float:
        return boot_clock() + self.ahead


# --- who may write ----------------------------------------------------------------------------------------


def test_one_leads_and_the_next_one_does_once_it_has_gone(place: EtcdPlace) -> None:
    first = etcd.journal(place)
    second = Lead(Gateway(place, EtcdConfig()), place, "ipc:///other")
    assert second.attempt().startswith("ipc:///test (host ")
    first.write(DECIDED)
    first.close()
    assert not second.attempt()
    journal = EtcdJournal(second, place, "")
    assert journal.live("policy") == LiveVersion(4, "r", 1, "s1")
    journal.close()


def test_a_leader_that_was_replaced_can_write_nothing_more_whatever_its_clock_says(place: EtcdPlace) -> None:
    old = etcd.journal(place)
    old.write(DECIDED)
    old._lead.gateway.ask("lease/revoke", {"ID": str(old._lead._lease)}, 1.0)  # as etcd does after a while
    new = etcd.journal(place)
    new.write(replace(DECIDED, swap="s2", version=5))
    for _ in range(2):
        with pytest.raises(LeadLost, match=r"another coordinator leads|may write"):
            old.write(replace(DECIDED, swap="s3", version=6))
    with pytest.raises(LeadLost):
        old.note(replace(DECIDED, state="committed"))
    new.close()
    found = etcd.journal(place)
    assert [r.swap for r in found.recent("", 9)] == ["s2", "s1"]
    assert found.live("policy") == LiveVersion(5, "r", 2, "s2")
    found.close()


def test_a_leader_without_a_successor_can_write_nothing_either_once_its_lease_has_run_out(place: EtcdPlace) -> None:
    journal = etcd.journal(place)
    journal._lead.gateway.ask("lease/revoke", {"ID": str(journal._lead._lease)}, 1.0)
    with pytest.raises(LeadLost, match="lease in etcd has run out"):
        journal.write(DECIDED)
    with pytest.raises(LeadLost):
        journal._lead._renewed = 0.0
        journal.guard()


def test_a_leader_that_was_stopped_for_longer_than_its_lease_stops_by_itself(place: EtcdPlace) -> None:
    clock = Clock()
    journal = EtcdJournal(etcd.lead(place, clock), place, "")
    clock.ahead = LEASE_S - 0.5
    journal.guard()  # it has been renewed
    clock.ahead += LEASE_S + 0.1
    for what in (journal.guard, lambda: journal.write(DECIDED)):
        with pytest.raises(LeadLost, match=r"ran out [0-9.]+ s ago: it was stopped, or cut off"):
            what()
    journal.close()


def test_a_leader_that_etcd_does_not_answer_leads_until_its_lease_ends(
    place: EtcdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    journal = EtcdJournal(etcd.lead(place, clock), place, "")
    monkeypatch.setattr(lead_module, "RENEWING_S", 0.05)
    monkeypatch.setattr(Gateway, "_connection", lambda *_: (_ for _ in ()).throw(OSError("cut off")))
    clock.ahead = LEASE_S - 1.5
    journal.guard()
    with pytest.raises(CommitError, match=r"no majority of etcd has answered .*cut off.*etcdctl endpoint status"):
        monkeypatch.setattr("refitd.coordinator.journals.etcd.WRITE_S", 0.05)
        journal.write(DECIDED)  # certainly not written, so it may be retried
    clock.ahead = LEASE_S + 0.1
    with pytest.raises(LeadLost):
        journal.guard()


def test_a_lead_whose_answer_is_lost_is_found_by_the_next_attempt(place: EtcdPlace) -> None:
    found = Lead(Line(place, EtcdConfig()), place, "ipc:///test")
    Line.fate = "answer"
    lead_module.LOOKING_S, before = 0.2, lead_module.LOOKING_S
    try:
        with pytest.raises(NotReached):
            found.attempt()
    finally:
        Line.fate, lead_module.LOOKING_S = "", before
    assert not found.attempt() and found.revision
    EtcdJournal(found, place, "").close()


# --- writes whose answer is lost --------------------------------------------------------------------------


def test_a_write_whose_first_answer_is_lost_is_read_back_and_holds_once(line: EtcdJournal, place: EtcdPlace) -> None:
    Line.fate = "first answer"
    line.write(DECIDED)
    line.write(replace(DECIDED, swap="s2", version=5))
    line.close()
    found = etcd.journal(place)
    assert found.live("policy") == LiveVersion(5, "r", 2, "s2") and len(found.recent("", 9)) == 2
    found.close()


@pytest.mark.parametrize("fate", ["request", "answer"])
def test_a_leader_that_cannot_know_whether_a_write_holds_says_neither_and_leads_no_more(
    line: EtcdJournal, place: EtcdPlace, fate: str
) -> None:
    Line.fate = fate
    with pytest.raises(LeadLost, match="it is not known whether the last write holds"):
        line.write(DECIDED)
    Line.fate = ""
    with pytest.raises(LeadLost):
        line.write(replace(DECIDED, swap="s2"))
    line.close()
    found = etcd.journal(place)
    assert [r.swap for r in found.recent("", 9)] == (["s1"] if fate == "answer" else [])
    found.close()


def test_a_request_that_arrives_late_does_nothing(line: EtcdJournal, place: EtcdPlace) -> None:
    late: list[Json] = []
    ask = line._lead.gateway.ask

    def keep(what: str, body: Json, within_s: float) -> Json:
        late.append(body)
        return ask(what, body, within_s)

    line._lead.gateway.ask = keep  # type: ignore[method-assign]
    line.write(DECIDED)
    line.write(replace(DECIDED, swap="s2", version=5))
    for body in late:
        assert not ask("kv/txn", body, 1.0).get("succeeded")
    line.write(replace(DECIDED, swap="s3", version=6))  # the repeated requests had no effect
    assert line.live("policy") == LiveVersion(6, "r", 3, "s3")


# --- what it does not continue ----------------------------------------------------------------------------


def put(server: etcd.Etcd, key: str, value: str) -> None:
    server.ctl("put", key, value)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("format", '{"schema": 99, "cluster": ""}', r"a newer refitd has written it \(schema 99"),
        ("format", "hello", "its key format holds 'hello'; another program's"),
        ("config/x", "hello", "it holds the key config/x; another program's"),
        ('live/["policy"]', '["policy", 4]', "is damaged: 6 columns are expected"),
        ('live/["policy"]', "hello", "is damaged"),
        ('live/["policy"]', '["other", 4, "r", 1, "s1", 1.0]', "is damaged: its key belongs to another row"),
        ('live/["policy"]', '["policy", "four", "r", 1, "s1", 1.0]', "its rows do not fit"),
        ('swaps/["s"]', '[1, "s", "m", 1, "decided", "", "", 1.0, "AAAA", ""]', "is damaged"),
    ],
)
def test_what_does_not_belong_here_is_refused_by_name(
    server: etcd.Etcd, place: EtcdPlace, key: str, value: str, error: str
) -> None:
    put(server, f"{place.prefix}/{key}", value)
    lead = etcd.lead(place)
    with pytest.raises(CommitError, match=error) as refused:
        EtcdJournal(lead, place, "")
    assert str(place) in str(refused.value)
    lead.release()


def test_another_clusters_journal_is_refused_by_leaders_and_standbys(place: EtcdPlace) -> None:
    journal = EtcdJournal(etcd.lead(place), place, "one")
    with pytest.raises(CommitError, match=r"have the key one, and this one's is two.* a prefix of its own"):
        check_place(Gateway(place, EtcdConfig()), place, "two")
    check_place(Gateway(place, EtcdConfig()), place, "one")
    journal.close()
    lead = etcd.lead(place)
    with pytest.raises(CommitError, match="have the key one"):
        EtcdJournal(lead, place, "two")
    lead.release()


def test_two_clusters_in_one_etcd_do_not_see_each_other(server: etcd.Etcd, place: EtcdPlace) -> None:
    journals = [etcd.journal(server.place(f"{place.prefix}{end}")) for end in ("/a", "/ab", "/b")]
    for i, journal in enumerate(journals[:2]):
        journal.write(replace(DECIDED, version=i))
    journals[0].close()
    again = etcd.journal(server.place(f"{place.prefix}/a"))
    assert again.highest("policy") == 0 and journals[1].highest("policy") == 1 and journals[2].is_new
    for journal in (again, *journals[1:]):
        journal.close()
    above = etcd.lead(place)
    with pytest.raises(CommitError, match="it holds the key a/decided"):
        EtcdJournal(above, place, "")
    above.release()


@pytest.mark.slow
def test_members_of_two_clusters_are_refused(server: etcd.Etcd, place: EtcdPlace) -> None:
    with etcd.Etcd() as other:
        both = EtcdPlace((*place.members, *other.place().members), place.prefix, False)
        found = Gateway(both, EtcdConfig())
        found.ask("kv/range", {"key": "YQ=="}, 1.0)
        found._members.reverse()
        with pytest.raises(Refused, match="is of another etcd cluster"):
            found.ask("kv/range", {"key": "YQ=="}, 1.0)


def test_a_journal_survives_compaction(server: etcd.Etcd, place: EtcdPlace) -> None:
    journal = etcd.journal(place)
    for number in range(5):
        journal.write(replace(DECIDED, swap=f"s{number}", version=number))
    server.ctl("compact", str(server.revision()))
    journal.write(replace(DECIDED, swap="s9", version=9))
    journal.close()
    found = etcd.journal(place)
    assert found.live("policy") == LiveVersion(9, "r", 6, "s9") and len(found.recent("", 99)) == 6
    found.close()


def test_more_than_etcd_takes_at_once_is_refused_and_the_next_write_holds(place: EtcdPlace) -> None:
    journal = etcd.journal(place)
    with pytest.raises(Refused, match=r"too many operations.*--max-txn-ops"):
        journal.write(*(replace(DECIDED, swap=f"s{i}", model=f"m{i}") for i in range(60)))
    assert journal.is_new
    journal.write(DECIDED)
    assert journal.live("policy") == LiveVersion(4, "r", 1, "s1")
    journal.close()


def test_reports_are_packed(server: etcd.Etcd, place: EtcdPlace) -> None:
    journal = etcd.journal(place)
    report = json.dumps([{"replica": "r", "rank": i, "state": "committed"} for i in range(30_000)]).encode()
    journal.write(replace(DECIDED, report=report))
    journal.close()
    assert len(server.ctl("get", "--prefix", f"{place.prefix}/swaps")) < len(report) / 5
    found = etcd.journal(place)
    assert found.decided("s1") == replace(DECIDED, report=report)
    found.close()


# --- an etcd that is out of order -------------------------------------------------------------------------


@pytest.mark.slow
def test_an_etcd_that_is_full_refuses_decisions_until_there_is_room() -> None:
    with etcd.Etcd(options=("--quota-backend-bytes", str(1 << 20))) as server:
        journal = etcd.journal(server.place())
        with pytest.raises(Refused, match=r"etcd is full: compact and defragment it.*alarm disarm"):
            for number in range(300):
                journal.write(replace(DECIDED, swap=f"s{number}", plan="x" * 20_000))
        written = number
        journal.guard()  # it still leads
        with pytest.raises(Refused, match="etcd is full"):
            journal.note(replace(DECIDED, state="committed"))
        server.ctl("del", "--prefix", '/refitd/swaps/["s1')  # room
        server.ctl("compact", "--physical", str(server.revision()))
        server.ctl("defrag")
        server.ctl("alarm", "disarm")
        journal.write(replace(DECIDED, swap="last", version=7))
        assert journal.live("policy") == LiveVersion(7, "r", written + 1, "last")
        assert journal.recent("", 2)[1].state == "committed"  # the notes that failed before were written first
        journal.close()


@pytest.mark.parametrize("talk", [b"", b"HTTP/1.1 200 OK\r\n\r\nhello", b"SSH-2.0-OpenSSH\r\n"])
def test_what_is_no_etcd_is_named(talk: bytes, listener: Callable[[bytes], int]) -> None:
    place = EtcdPlace((("127.0.0.1", listener(talk)), ("127.0.0.1", free_port())), "/refitd", False)
    with pytest.raises(NotReached, match="no majority of etcd has answered") as refused:
        Gateway(place, EtcdConfig()).ask("kv/range", {"key": "YQ=="}, 0.3)
    for _, port in place.members:
        assert f"127.0.0.1:{port}: " in str(refused.value)


@pytest.fixture
def listener() -> Iterator[Callable[[bytes], int]]:
    import socket
    import threading

    made: list[socket.socket] = []

    def listen(talk: bytes) -> int:
        end = socket.create_server(("127.0.0.1", 0))
        made.append(end)

        def serve() -> None:
            while True:
                try:
                    with end.accept()[0] as connection:
                        connection.recv(1 << 16)
                        connection.sendall(talk)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        return int(end.getsockname()[1])

    yield listen
    for end in made:
        end.shutdown(socket.SHUT_RDWR)
        end.close()
