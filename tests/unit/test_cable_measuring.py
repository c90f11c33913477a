"""Measuring cables: the rounds, what is made of their figures, and the coordinator's and the daemon's part."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from msgspec import convert
from msgspec.structs import replace

from refitd.config import Config, TransportConfig
from refitd.coordinator.cables import cables_for, read_cluster
from refitd.daemon.actions import ToWorker
from refitd.daemon.cable_tests import LocalCableTests
from refitd.daemon.epochs import LocalEpochs
from refitd.errors import ConfigError
from refitd.offline.clusters import GB, cables_of, load_cluster
from refitd.offline.measured import PARTNERS, cluster_of, rounds_of, speeds_of, to_toml
from refitd.plan.cables import EQUAL
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Secret
from refitd.protocol.cable_reports import CableRate, CableReport, CablesMeasured
from refitd.protocol.reports import ReloadReport
from refitd_cli import cables
from tests.support.cli import STATUS, FakeClient, run
from tests.support.coordinator_harness import Harness, kinds

Pair = local.CablePair


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 31, 64])
def test_every_node_sends_to_and_receives_from_several_others_and_does_one_thing_at_a_time(count: int) -> None:
    nodes = [f"n{i:02}" for i in range(count)]
    rounds = rounds_of(nodes)
    partners: dict[tuple[str, str], set[str]] = {}
    for pairs in rounds:
        ends = [end for pair in pairs for end in pair]
        assert len(set(ends)) == len(ends)
        for source, target in pairs:
            partners.setdefault((source, "sends"), set()).add(target)
            partners.setdefault((target, "receives"), set()).add(source)
    assert len(rounds) <= 2 * PARTNERS
    for node, way in itertools.product(nodes, ("sends", "receives")):
        assert len(partners[node, way]) >= min(PARTNERS, count - 1) - (count % 2 and count > PARTNERS)


def test_a_cable_that_is_slow_one_way_shows_and_is_written_down(tmp_path: Path) -> None:
    fast, nodes = 12.4e6, ("a", "b", "c", 'd"x')
    true = {(node, way): fast for node in nodes for way in ("send", "receive")}
    true["b", "send"], true['d"x', "receive"] = 3e6, 5e6
    rates = [
        (source, target, min(true[source, "send"], true[target, "receive"]))
        for pairs in rounds_of(nodes)
        for source, target in pairs
    ]
    send, receive = speeds_of([*rates, ("a", "b", 0.0)])
    assert {**{(n, "send"): v for n, v in send.items()}, **{(n, "receive"): v for n, v in receive.items()}} == true
    file = tmp_path / "cables.toml"
    file.write_text(to_toml(cluster_of("measured", 'by "hand"', send, receive)))
    found = load_cluster(file)
    assert {node.name: (node.send_gb_s, node.receive_gb_s) for node in found.nodes} == {
        "b": (0.003, None),
        'd"x': (None, 0.005),
    }
    speeds = cables_of(found, [*nodes, "a"])
    assert speeds.send["b"] == pytest.approx(3e6) and speeds.receive["b"] == speeds.send["a"] == pytest.approx(fast)
    assert speeds.default == pytest.approx(0.0124 * GB)
    with pytest.raises(ValueError, match="no cable was measured"):
        cluster_of("x", "", {}, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "kind is None"),
        ('kind = "cluster"\nname = "x"', "nic_gb_s: missing"),
        ('kind = "cluster"\nname = "x"\nnic_gb_s = 0', "nic_gb_s"),
        ('kind = "cluster"\nname = "x"\nnic_gb_s = 1\n[[nodes]]\nname = "a"\nsend_gb_s = nan', "send_gb_s"),
        ('kind = "cluster"\nname = "x"\nnic_gb_s = 1\n[[nodes]]\nname = "a"\nreceive_gb_s = -1.0', "receive_gb_s"),
    ],
)
def test_a_file_of_speeds_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cables.toml"
    config = Config(transport=TransportConfig(cables=str(file)))
    with pytest.raises(ConfigError, match=r"transport\.cables: .*cables\.toml"):
        read_cluster(config)
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_cluster(config)
    assert read_cluster(Config()) is None and cables_for(None, ["a"]) is EQUAL


def measuring() -> tuple[Harness, list[cluster.MeasureCable]]:
    h = Harness().join("n0", workers=(1, 2, 3))
    h.join("n1", pid=11, workers=(4, 5))
    h.join("n2", pid=12)
    h.say("n2", local.MeasureCables(pairs=(Pair("n0", "n1"),), seconds=1.0), request=7)
    orders = {node: message for node, _, message in h.sent if isinstance(message, cluster.MeasureCable)}
    assert orders["n0"].sends and orders["n0"].peer == "n1" and not orders["n1"].sends and len(orders) == 2
    return h, [orders["n0"], orders["n1"]]


def test_the_coordinator_has_two_nodes_measured_and_tells_who_asked() -> None:
    h, (order, _) = measuring()
    assert (order.epoch.nodes, order.epoch.lanes) == (("n0", "n1"), 2)
    put = cluster.EpochPut(epoch=order.epoch.id, lane=0, key="k", value=b"v")
    assert kinds(h.say("n0", put)) == ["EpochValue"], "workers meet through the coordinator"
    assert h.say("n2", cluster.CableMeasured(order.test, 1, 1)) == [], "it takes no part"
    assert h.say("n0", cluster.CableMeasured(order.test)) == []
    h.say("n1", cluster.CableMeasured(order.test, 100, 50))
    assert [(node, type(message).__name__) for node, _, message in h.sent] == [
        ("n0", "DropPlan"),
        ("n1", "DropPlan"),
        ("n2", "CablesMeasured"),
    ]
    assert h.sent[-1][2] == CablesMeasured("gloo", 2, (CableRate("n0", "n1", 100, 50),))
    assert h.say("n0", put) == [], "the epoch is over"


def test_what_cannot_be_measured_is_refused_or_fails_by_name() -> None:
    h, (order, _) = measuring()

    def failed(sent: list[object]) -> str:
        (found,) = [message for message in sent if isinstance(message, local.Failure)]
        return found.message

    def ask(*pairs: Pair) -> str:
        return failed(h.say("n2", local.MeasureCables(pairs=pairs), request=8))

    assert "being measured already" in ask(Pair("n0", "n1"))
    refused = cluster.PlanRefused(order.test, order.epoch.id, "worker 0 on node n1", "no way there")
    assert "worker 0 on node n1: no way there" in failed(h.say("n1", refused))
    assert "node 'nowhere' is not connected; connected: n0, n1, n2" in ask(Pair("n0", "nowhere"))
    assert "'n0' is in several pairs" in ask(Pair("n0", "n1"), Pair("n2", "n0"))
    assert "'n0' is in several pairs" in ask(Pair("n0", "n0"))
    h, _ = measuring()
    h.now += 9
    for node in ("n0", "n2"):
        h.say(node, cluster.NodeUpdate(status=h.state.nodes[node].status))
    h.now += 2
    h.sent.clear()
    h.tick()
    assert "node n1: no word from it" in failed([message for _, _, message in h.sent])


def test_no_cable_is_measured_while_a_swap_runs() -> None:
    h = Harness().ready()
    h.join("n1", pid=11)
    h.say("n0", cluster.ShardPublished(member="src", version=1))
    h.say("n0", local.StartSwap("m"), request=2)
    sent = h.say("n0", local.MeasureCables(pairs=(Pair("n0", "n1"),)), request=3)
    assert [m.message for m in sent if isinstance(m, local.Failure)] == [
        "a swap of model 'm' is running; measure when it has ended"
    ]


def test_a_swap_that_begins_ends_the_measurement_first() -> None:
    h = Harness().ready()
    h.join("n1", pid=11)
    h.say("n0", cluster.ShardPublished(member="src", version=1))
    h.say("n0", local.MeasureCables(pairs=(Pair("n0", "n1"),)), request=3)
    sent = h.say("n0", local.StartSwap("m"), request=4)
    assert kinds(sent)[:3] == ["DropPlan", "DropPlan", "Failure"] and "LoadPlan" in kinds(sent)
    assert "a swap of model 'm' has begun" in next(m.message for m in sent if isinstance(m, local.Failure))


def test_a_daemon_has_all_lanes_measure_and_adds_them_up() -> None:
    out: list[object] = []
    said: list[cluster.NodeMessage] = []
    formed: list[tuple[str, str]] = []
    epochs = LocalEpochs("n1", "::1", out.append, lambda plan, epoch: formed.append((plan, epoch)))
    tests = LocalCableTests("n1", 2, epochs, out.append, said.append)
    plan = cluster.EpochPlan("e", "gloo", ("n0", "n1"), ("h", "h"), 2, 1 << 20, 5.0, Secret(bytes(32)))
    tests.begin(cluster.MeasureCable("t", plan, "n0", False, 1.0))
    for lane in range(2):
        epochs.worker_said(lane, sidecar.EpochJoined(epoch="e"))
    assert formed == [("t", "e")] and not tests.epoch_formed("a plan") and tests.epoch_formed("t")
    orders = [i.message for i in out if isinstance(i, ToWorker) and isinstance(i.message, sidecar.TimeCable)]
    assert [(order.peer, order.sends) for order in orders] == [(0, False)] * 2
    run_of = orders[0].run
    tests.worker_said(0, sidecar.CableTimed(run_of, 1000, 10.0, 11.0))
    tests.worker_said(1, sidecar.CableTimed(run_of, 500, 10.5, 12.0))
    tests.worker_said(1, sidecar.CableTimed(run_of + 1, 500, 10.5, 12.0))
    assert said == [cluster.CableMeasured("t", 1500, 750)]
    tests.drop("t")
    tests.drop_all()
    assert [i.message for i in out if isinstance(i, ToWorker)][-2:] == [sidecar.LeaveEpoch(epoch="e")] * 2
    tests.begin(cluster.MeasureCable("t", plan, "elsewhere", False, 1.0))
    assert "does not fit this node" in said[-1].reason  # type: ignore[union-attr]


class Meter(FakeClient):
    """A cluster of two nodes of which one sends slowly, or not at all."""

    slow = 1_000_000

    def status(self, *, timeout=30.0):
        return replace(STATUS, nodes=tuple(replace(STATUS.nodes[0], node=name) for name in "ab"))

    def measure_cables(self, pairs, *, duration):
        self.asked.append(("measure", tuple(pairs), duration))
        reason = "" if self.slow else "cut"
        rates = (CableRate(s, t, 10, self.slow if s == "b" else 9_000_000, reason) for s, t in pairs)
        return CablesMeasured("gloo", 2, tuple(rates))


def test_doctor_measures_cables_and_writes_the_file(tmp_path: Path) -> None:
    client = Meter()
    file = tmp_path / "cables.toml"
    ran = run(client, "doctor", "--links", "--seconds", "0.5", "--output", str(file))
    assert (ran.status, client.closed) == (0, True)
    assert "0.008 Gbit/s" in ran.stdout and "round 2 of 2" in ran.stderr
    assert [asked[2] for asked in client.asked if asked[0] == "measure"] == [0.5, 0.5]
    (slow,) = [node for node in load_cluster(file).nodes if node.name == "b"]
    assert slow.send_gb_s == pytest.approx(0.001)
    said = run(Meter(), "doctor", "--links", "--json")
    assert convert(said.object, CableReport).rates[0].target == "b", "as docs/refitctl.schema.json says"
    assert said.object["nodes"][1] == {"node": "b", "send": 1_000_000, "receive": 9_000_000}
    assert 'kind = "cluster"' in said.object["file"]
    assert 'kind = "cluster"' in run(Meter(), "doctor", "--links").stdout.splitlines()
    cut = Meter()
    cut.slow = 0
    ran = run(cut, "doctor", "--links")
    assert ran.status == 1 and "not measured" in ran.stdout and "cut" in ran.stdout
    assert run(FakeClient(), "doctor", "--links").status == 1, "one node has no cable to another"
    assert run(FakeClient(), "doctor", "--output", "x").status == 2


def test_a_report_without_figures_makes_no_file() -> None:
    assert cables.file_of(CableReport("gloo", 1, (), ())) == ""


def test_reload_says_by_which_speeds_plans_go() -> None:
    class Client(FakeClient):
        def reload(self):
            return ReloadReport(uses_keys=False, cables="measured", absent=("n9",))

    ran = run(Client(), "reload")
    assert "cables: as measured says" in ran.stdout and "n9" in ran.stdout and "nothing to read" not in ran.stdout
