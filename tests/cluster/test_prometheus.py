"""A real Prometheus scrapes real daemons through swaps and faults: names, alerts, and every query of the dashboard."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import refitd
from refitd.testing import Cluster, Engine, eventually
from refitd.testing.daemon import free_port
from tests.support.programs import ended

CONFIGS = Path(__file__).parents[2] / "configs"
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="no prometheus and promtool on PATH (Debian: apt-get install prometheus)",
)

STEP_S = 15


def promtool(*arguments: str, text: str | None = None) -> str:
    ran = subprocess.run(
        ["promtool", *arguments], input=text, cwd=CONFIGS / "prometheus", capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def queries() -> list[tuple[str, str]]:
    """Return (panel, query) of the dashboard, with its variables filled in."""
    found = json.loads((CONFIGS / "grafana/refitd.json").read_text())
    variables = {"$model": ".*", "$__rate_interval": f"{STEP_S}s"}
    for panel in found["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for variable, value in variables.items():
                query = query.replace(variable, value)
            assert "$" not in query, query
            yield panel["title"], query


class Scraped(Cluster):
    """Two nodes and a coordinator, each with metrics."""

    def __init__(self) -> None:
        self.ports = {name: free_port() for name in ("coordinator", "n0", "n1")}
        super().__init__(config="[deadlines]\ncommit_s = 2.0\n")

    def environment(self, name: str) -> Mapping[str, str]:
        return {"REFITD_METRICS__ENDPOINT": str(self.ports[name])}


class Prometheus:
    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, path: str, **arguments: object) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def is_up(self) -> bool:
        try:
            return len(self.ask("query", query="up == 1")["result"]) == 3
        except OSError:
            return False

    def samples(self, query: str, since: float) -> list[float]:
        """Return all values of a query since a time."""
        found = self.ask("query_range", query=query, start=since, end=time.time(), step=1)
        return [float(value) for series in found["result"] for _, value in series["values"]]


@contextmanager
def prometheus(cluster: Scraped, folder: Path) -> Iterator[Prometheus]:
    jobs = {"refitd-coordinator": ("coordinator",), "refitd-daemon": ("n0", "n1")}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(CONFIGS / "prometheus/refitd.rules.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"localhost:{cluster.ports[name]}" for name in names]}]}
            for job, names in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with ended(subprocess.Popen(command)):
        found = Prometheus(port)
        eventually(found.is_up, "it scrapes all three", 60)
        yield found


@pytest.mark.slow
@needs_prometheus
def test_rules_configuration_and_their_tests_pass() -> None:
    promtool("check", "rules", "refitd.rules.yml")
    promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "refitd.rules.test.yml")


@pytest.mark.slow
@needs_prometheus
def test_every_query_of_the_dashboard_has_data_and_faults_alarm(tmp_path: Path) -> None:
    began = time.time()
    with Scraped() as cluster, prometheus(cluster, tmp_path) as server:
        first, second = cluster.daemons["n0"], cluster.daemons["n1"]
        with first.connect("trainer") as trainer, second.connect("engine") as engine, first.connect("b") as other:
            source = trainer.register_source("policy", {"w": torch.ones(100_000)})
            targets = [
                client.register_target("policy", {"w": torch.zeros(100_000)}, replica=name)
                for client, name in ((engine, "a"), (other, "b"))
            ]
            with Engine(*targets):
                for version in range(1, 9):
                    source.publish(version)
                    trainer.swap("policy", timeout=30)
                    time.sleep(1)
            assert trainer.verify("policy").outcome == "proven"
            (worker,) = first.workers()
            os.kill(worker, signal.SIGKILL)
            eventually(lambda: first.node_of("n0").workers not in ((0,), (worker,)), "another worker")
            with pytest.raises(refitd.RefusedError):
                trainer.swap("nothing", timeout=30)
            source.publish(9)
            with pytest.raises(refitd.SwapFailed):
                trainer.swap("policy", timeout=30)  # no target polls
            time.sleep(3)
            for port in cluster.ports.values():
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
                    promtool("check", "metrics", text=page.read().decode())
            empty = [
                f"{panel}: {query}"
                for panel, query in queries()
                if not any(not math.isnan(value) for value in server.samples(query, began))
            ]
            assert empty == []
            links = 'sum by (source_node, target_node, transport) (refitd_moved_bytes_total{transport!="local"})'
            ((crossed,),) = [[series["metric"]] for series in server.ask("query", query=links)["result"]]
            assert crossed == {"source_node": "n0", "target_node": "n1", "transport": "gloo"}
            alarms = {one["labels"]["alertname"] for one in server.ask("alerts")["alerts"] if one["state"] == "firing"}
            assert alarms == {"RefitdSwapIncomplete"}
            cluster.daemons["n1"].kill()
            lost = 'ALERTS{alertname="RefitdNodeLost",alertstate="firing"}'
            eventually(lambda: server.samples(lost, began), "the lost node alarms")
            cluster.daemons["n1"].start()
