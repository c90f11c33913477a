"""Coordinators that share a journal in a real etcd of three members; all of them are killed, frozen and cut off."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from refitd.testing import eventually
from refitd.testing.daemon import ProcessFailed
from refitd.testing.processes import Process
from tests.support import etcd, network
from tests.support.led import Fleet, Led
from tests.support.led_trial import TAKE_OVER_S, Trial

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(etcd.MISSING), reason=etcd.MISSING)]

NO_NETWORK = network.why_not()
FAULTS = (
    "coordinator killed",
    "coordinator frozen",
    "coordinator stopped (SIGTERM)",
    "etcd's leader killed",
    "etcd's leader frozen",
    "another member of etcd killed",
    "another member of etcd frozen",
    "coordinator and etcd's leader killed",
    "etcd compacted",
    "coordinator killed, the others' clocks jump",
    "coordinator's host cut off",
    "etcd's leader's host cut off",
    "coordinator cut off from etcd, not from daemons",
)


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    hosts = None if NO_NETWORK else network.SwitchedHosts(5, 1000)
    try:
        found = Trial(hosts)
        with found.running():
            yield found
    finally:
        if hosts is not None:
            hosts.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_middle_of_swaps_is_survived_and_nothing_is_decided_twice(trial: Trial, fault: str) -> None:
    if fault not in trial.faults():
        pytest.skip(f"no cables to pull: {NO_NETWORK or 'no C compiler either'}")
    outcome = trial.suffer(fault)
    assert "clocks" in fault or outcome.decided_s < TAKE_OVER_S, outcome
    if fault.startswith("coordinator"):
        assert outcome.took_over
    judged = trial.judge()
    assert judged.wrong == [] and judged.decisions > 0


@pytest.fixture(scope="module")
def server() -> Iterator[etcd.Etcd]:
    with etcd.Etcd() as found:
        yield found


def page(endpoint: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{endpoint}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def test_a_standby_lives_and_is_not_ready_and_says_so_once(server: etcd.Etcd) -> None:
    with Led(server.url("/standby"), nodes=("n0",), config="[metrics]\nendpoint = 0\n") as led:
        first, standby = led.coordinators
        ends = [re.findall(r"event=metrics endpoint=(\S+)", each.log())[-1] for each in led.coordinators]
        eventually(lambda: page(ends[0], "/readyz") == (200, "ok\n"), "the leader is ready")
        assert page(ends[1], "/healthz") == (200, "ok\n")
        status, said = page(ends[1], "/readyz")
        assert status == 503 and said.startswith(f"standby of {led.endpoints[0]} (host ")
        assert "refitd_leads 1.0" in page(ends[0], "/metrics")[1] and "refitd_leads 0.0" in page(ends[1], "/metrics")[1]
        assert led.leader() is first and standby.log().count("event=standby") == 1
        first.stop()
        eventually(lambda: Led.leads(standby), "the standby leads")
        daemon = led.daemons["n0"]
        eventually(lambda: "event=follows" in daemon.log().partition("event=coordinator-left")[2], "it is followed")
        assert "event=coordinator-silent" not in daemon.log(), "nobody has waited for silence"
        eventually(lambda: page(ends[1], "/readyz") == (200, "ok\n"), "it is ready")
        assert not [s for s in standby.log().splitlines() if "level=warning" in s and "event=slow-turn" not in s]
        Process.start(first)
        eventually(lambda: "event=standby" in first.log(), "it stands by")


def test_a_leader_whose_etcd_is_gone_stops_deciding_and_leads_again_when_it_is_back() -> None:
    with etcd.Etcd() as server, Led(server.url(), nodes=("n0",)) as led:
        fleet = Fleet(led.daemons)
        with fleet.polling():
            fleet.insist()
            server.members[0].kill()
            eventually(lambda: led.leader() is None, "nobody leads")
            server.members[0].start()
            fleet.insist()
        assert fleet.torn() == []
        fleet.close()


def test_a_coordinator_of_another_cluster_or_format_is_refused_with_the_reason(server: etcd.Etcd) -> None:
    server.ctl("put", "/damaged/format", json.dumps({"schema": 99, "cluster": ""}))
    with Led(server.url("/shared"), nodes=("n0",)):
        for path, says in (
            ("/shared", "belongs to a cluster whose coordinators have the key"),
            ("/damaged", "a newer refitd has written it (schema 99"),
        ):
            with pytest.raises((ProcessFailed, AssertionError)) as refused:
                Led(server.url(path), nodes=("n0",)).start()
            assert says in str(refused.value)
