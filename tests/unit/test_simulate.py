"""refitctl simulate: hand-computed results, cluster files, traces."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from refitd.clusters import ClusterSpeeds, NodeSpeed, load_cluster
from refitd.describe.metadata import Roster
from refitd.errors import ConfigError
from refitd.offline.files import read
from refitd.offline.rosters import rosters_of
from refitd.plan.build import plan_copies
from refitd.simulate import FanOut, Prediction, Simulation
from refitd_cli.commands.simulate import trace
from refitd_cli.group import Commands
from tests.support import cli
from tests.support.manifests import LAYOUTS

CLUSTERS = LAYOUTS.parent / "clusters"
MODEL = {
    "name": "m",
    "dtype": "bfloat16",
    "tensors": [{"name": "w", "shape": [1024, 1000], "split": {"dim": 0}, "stage": "first"}],
}
W = 1024 * 1000 * 2  # bytes
# a node's card moves 1 MB/s; all other links are so fast that they do not count
SLOW = ClusterSpeeds(
    name="slow", nic_gb_s=1e-3, rank_gb_s=1e6, memory_gb_s=1e6, control_s=0.0, commit_s=0.0, chunk_bytes=1
)


def layout(name: str, **sizes: int) -> dict[str, object]:
    return {"kind": "layout", "name": name, "model": {"kind": "model", **MODEL}, **sizes}


def rosters(source: dict[str, int], target: dict[str, int]) -> list[Roster]:
    return rosters_of(read(layout("from", **source), "from"), [read(layout("to", **target), "to")])  # type: ignore[arg-type, list-item]


def run(
    route: FanOut, source: dict[str, int], target: dict[str, int], cluster: ClusterSpeeds = SLOW, **how: float
) -> Prediction:
    ranks = rosters(source, target)
    return Simulation(plan_copies(ranks), ranks, cluster).run(route, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("replicas", [1, 2, 7])
def test_replicas_that_pass_it_on_cost_the_trainers_cable_one_copy(replicas: int) -> None:
    one = {"ranks_per_node": 1}
    direct = run(FanOut.DIRECT, one, {"dp": replicas, **one})
    relayed = run(FanOut.RELAYED, one, {"dp": replicas, **one})

    assert direct.seconds == pytest.approx(replicas * W / 1e6)
    assert direct.sent_bytes == direct.crossing_bytes == replicas * W
    assert relayed.seconds == pytest.approx(W / 1e6, rel=1e-4)
    assert relayed.sent_bytes == W and relayed.crossing_bytes == replicas * W and relayed.chain == replicas


def test_replicas_of_one_node_get_it_once() -> None:
    found = run(FanOut.DIRECT, {"ranks_per_node": 1}, {"dp": 4, "ranks_per_node": 4})
    assert found.crossing_bytes == W
    assert [phase.name for phase in found.phases] == ["control", "arriving", "copied onward", "commit"]


def test_chains_go_through_nodes_that_need_the_same() -> None:
    """Engines of two nodes each: the first nodes of all engines form one chain, the second ones another."""
    found = run(FanOut.RELAYED, {"ranks_per_node": 2, "tp": 2}, {"tp": 4, "dp": 3, "ranks_per_node": 2})
    assert found.chain == 3 and found.sent_bytes == W and found.crossing_bytes == 3 * W


@pytest.mark.parametrize("tp", [2, 4])
def test_chains_go_through_nodes_that_are_cut_differently(tp: int) -> None:
    """One engine has one rank, another has several; each engine is on one node."""
    source, *others = [layout("from"), layout("to"), layout("fine", tp=tp)]
    ranks = rosters_of(read(source, "from"), [read(other, "to") for other in others])  # type: ignore[arg-type, list-item]
    found = Simulation(plan_copies(ranks), ranks, SLOW).run(FanOut.RELAYED)
    assert (found.chain, found.sent_bytes, found.crossing_bytes) == (2, W, 2 * W)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("memory", [None, 1e-3])
def test_where_nothing_has_changed_only_memory_takes_time(memory: float | None) -> None:
    unlimited = replace(SLOW, rank_gb_s=None, memory_gb_s=memory)
    found = run(FanOut.DELTA, {"ranks_per_node": 1}, {"ranks_per_node": 1}, unlimited, changed=0.0)
    assert found.crossing_bytes == 0 and found.seconds == pytest.approx(2 * W / 1e6 if memory else 0.0)


def test_a_delta_is_as_long_as_what_changed_and_never_longer_than_the_whole() -> None:
    one = {"ranks_per_node": 1}
    whole, few = run(FanOut.DIRECT, one, one), run(FanOut.DELTA, one, one, changed=0.01)
    assert few.crossing_bytes == pytest.approx(0.01 * (2 + 1.1) / 2 * W, rel=1e-4)
    assert run(FanOut.DELTA, one, one, changed=1.0).crossing_bytes == whole.crossing_bytes == W
    assert run(FanOut.DELTA, one, one, changed=0.0).crossing_bytes == 0


def test_one_slow_node_is_named() -> None:
    slower = replace(SLOW, nodes=(NodeSpeed("node1", receive_gb_s=5e-4),))
    found = run(FanOut.DIRECT, {"ranks_per_node": 1}, {"dp": 2, "ranks_per_node": 1}, slower)
    assert found.seconds == pytest.approx(2 * W / 1e6)  # both cables of the two directions are full
    assert {"node0 sends", "node1 receives"} <= {cable.name for cable in found.cables if cable.busy > 0.99}


def test_who_sends_slowly_ends_the_chain() -> None:
    cluster = replace(SLOW, nodes=(NodeSpeed("node1", send_gb_s=1e-4),))
    found = run(FanOut.RELAYED, {"ranks_per_node": 1}, {"dp": 4, "ranks_per_node": 1}, cluster)
    assert found.seconds == pytest.approx(W / 1e6, rel=1e-3)


def test_uplinks_and_single_streams_limit() -> None:
    one = {"ranks_per_node": 1}
    uplinks = replace(SLOW, leaf_nodes=1, oversubscription=4.0)
    assert run(FanOut.DIRECT, one, one, uplinks).seconds == pytest.approx(4 * W / 1e6)
    streams = replace(SLOW, flow_gb_s=5e-4)
    assert run(FanOut.DIRECT, one, one, streams).seconds == pytest.approx(2 * W / 1e6)
    digests = replace(SLOW, digest_gb_s=2e-4)
    assert run(FanOut.DIRECT, one, one, digests).seconds == pytest.approx(5 * W / 1e6)


def test_the_trace_is_as_long_as_the_swap() -> None:
    found = run(FanOut.DIRECT, {"ranks_per_node": 1}, {"dp": 2, "ranks_per_node": 1})
    events = [e for e in trace([found])["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(found.seconds * 1e6)
    assert {e["args"].get("GB/s") for e in events if e["tid"]} >= {1e-3}
    assert np.isfinite([e["dur"] for e in events]).all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nic_gb_s = 0", "nic_gb_s: expected a number >= 1e-06"),
        ("nic_gb_s = 1\nnics = 3", "nics: unknown key; nearest: nic_gb_s; known: name, nic_gb_s"),
        ("nic_gb_s = 1\n[[nodes]]\nname = 'x'\nsend_gbs = 1", "nodes[0].send_gbs: unknown key; nearest: send_gb_s"),
        ("nic_gb_s = 1\nrank_gb_s = 1\nmemory_gb_s = 1\n[[nodes]]\nname = 'x'\nsend_gb_s = 0.0", "send_gb_s"),
        ("nic_gb_s = 1\nrank_gb_s = 1\nmemory_gb_s = 1\n[[nodes]]\nname = 'x'", "x sets no speed"),
        ("nic_gb_s = nan\nrank_gb_s = 1\nmemory_gb_s = 1", "nic_gb_s"),
        ("nic_gb_s = inf\nrank_gb_s = 1\nmemory_gb_s = 1", "nic_gb_s"),
        ("nic_gb_s = 1e-300\nrank_gb_s = 1\nmemory_gb_s = 1", "nic_gb_s"),
        ("rank_gb_s = 1\nmemory_gb_s = 1", "nic_gb_s: missing"),
        ("nic_gb_s = 1\noversubscription = 2", "oversubscription: there are no leaf switches; set leaf_nodes"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'kind = "cluster"\nname = "c"\n{text}\n')
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_cluster(file)


def test_a_node_that_no_rank_is_on_is_refused() -> None:
    nodes = (NodeSpeed("node77", send_gb_s=1.0),)
    elsewhere = ClusterSpeeds(name="c", nic_gb_s=1.0, rank_gb_s=1.0, memory_gb_s=1.0, nodes=nodes)
    with pytest.raises(ConfigError, match="no rank of the layouts is on node77; their nodes are node0, node1"):
        run(FanOut.DIRECT, {"ranks_per_node": 1}, {"ranks_per_node": 1}, elsewhere)


def test_the_command_shows_all_routes(tmp_path: Path) -> None:
    command = Commands(lazy={"simulate": "refitd_cli.commands.simulate:simulate"})
    train, serve = (LAYOUTS / f"llama-3-70b-{name}.toml" for name in ("train-tp8-pp4", "serve-tp4"))
    out = tmp_path / "t.json"
    given = ("simulate", "--source", str(train), "--target", str(serve), "--cluster", str(CLUSTERS / "dgx-h100.toml"))
    said = cli.run(None, *given, "-o", str(out), command=command)
    assert said.status == 0, said.stderr
    assert all(word in said.stdout for word in ("relayed delta", "limited by", "data sheets", "digest_gb_s = no limit"))
    assert json.loads(out.read_text())["traceEvents"]
    found = cli.run(None, *given, "--route", "direct", "--json", command=command).object
    assert found["defaults"] == {
        **{"digest_gb_s": "no limit", "flow_gb_s": "no limit", "nics_per_node": "one for each rank"},
        **{"leaf_nodes": "one switch for all", "oversubscription": 1.0, "chunk_bytes": 8 << 20},
        **{"control_s": 0.005, "commit_s": 0.001},
    }
    (route,) = found["routes"]
    assert route["route"] == "direct" and route["seconds"] > 0 and route["cables"]
    assert cli.run(None, *given, "-o", str(tmp_path), command=command).status == 2
