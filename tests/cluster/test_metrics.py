"""Metrics of real daemons: counts after swaps and faults, and endpoints that cannot be opened."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, ProcessFailed, eventually
from refitd.testing.daemon import free_port
from tests.support.fleet import go_live

Start = Callable[..., Daemon]


def page(port: int, path: str = "/metrics") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def value(port: int, series: str) -> float | None:
    """The value of a series, named as the page shows it."""
    found = re.search(rf"^{re.escape(series)} (\S+)$", page(port)[1], re.MULTILINE)
    return float(found[1]) if found else None


def ports(daemon: Daemon) -> tuple[int, int]:
    """The ports of a standalone daemon and its coordinator, from their log lines."""
    found = {
        process: int(port)
        for process, port in re.findall(r" process=(\w+) event=metrics endpoint=[\d.]+:(\d+)", daemon.log())
    }
    return found["daemon"], found["coordinator"]


def test_swaps_and_faults_are_counted_while_it_is_scraped_without_pause(start_daemon: Start, tmp_path: Path) -> None:
    config = '[metrics]\nendpoint = "127.0.0.1:0"\n[deadlines]\ncommit_s = 3.0\n'
    daemon = start_daemon(config, environment={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})  # as vLLM sets it
    node, head = ports(daemon)
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(0.01):
            page(node)
            page(head)

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
            source = trainer.register_source("policy", {"w": torch.ones(1000)})
            target = engine.register_target("policy", {"w": torch.zeros(1000)}, replica="a")
            go_live(trainer, source, 1, target)
            eventually(lambda: value(head, 'refitd_replica_version{model="policy",replica="a"}') == 1, "it is shown")
            assert trainer.verify("policy").outcome == "proven"
            with pytest.raises(refitd.RefusedError):
                trainer.swap("nothing", timeout=30)
            source.publish(2)
            with pytest.raises(refitd.SwapFailed) as late:
                trainer.swap("policy", timeout=30)  # no target polls
            assert late.value.report.cause == refitd.SwapCause.DEADLINE
            os.kill(daemon.workers()[0], signal.SIGKILL)
            eventually(lambda: value(node, 'refitd_worker_restarts_total{cause="died"}') == 1, "the death is shown")
            eventually(lambda: value(head, 'refitd_published_version{model="policy"}') == 2, "the version is shown")
            ended = "refitd_swaps_total{cause=%s,kind=%s,model=%s,outcome=%s}"
            expected = {
                ended % ('"none"', '"asked"', '"policy"', '"committed"'): 1,
                ended % ('"deadline"', '"asked"', '"policy"', '"incomplete"'): 1,
                'refitd_moved_bytes_total{model="policy",source_node="n0",target_node="n0",transport="local"}': 8000,
                'refitd_swap_phase_seconds_count{model="policy",phase="stage"}': 2,
                'refitd_digests_total{model="policy"}': 2,
                'refitd_verifications_total{model="policy",outcome="proven"}': 1,
                'refitd_refusals_total{request="StartSwap"}': 1,
                'refitd_decided_version{model="policy"}': 2,
                'refitd_replica_lag_versions{model="policy",replica="a"}': 1,
                'refitd_members{model="policy",role="target",state="waiting"}': 1,
                "refitd_journal_write_seconds_count": 5,  # the node's, too
                "refitd_nodes": 1,
            }
            # pages are made once a second
            eventually(lambda: value(head, next(s for s in expected if "incomplete" in s)) == 1, "the end is shown")
            assert {series: value(head, series) for series in expected} == expected
            expected = {
                'refitd_engine_pause_seconds_count{model="policy",replica="a"}': 1,
                'refitd_mismatches_total{found_in="staged"}': 0,
                "refitd_coordinator_up": 1,
                "refitd_clients": 2,
                'refitd_arenas{device="memory"}': 3,
                'refitd_node_targets{state="serving"}': 1,
            }
            assert {series: value(node, series) for series in expected} == expected
            assert [page(port, "/healthz") for port in (node, head)] == [(200, "ok\n")] * 2
            assert page(head, "/readyz") == (200, "ok\n")
            eventually(lambda: page(node, "/readyz")[0] == 200, "another worker")
    finally:
        stop.set()
        scraper.join()
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_without_its_coordinator_is_healthy_and_not_ready() -> None:
    port = free_port()
    daemon = Daemon(f"[metrics]\nendpoint = {port}\n", standalone=False).start(timeout=30)
    try:
        assert page(port, "/healthz") == (200, "ok\n")
        assert page(port, "/readyz") == (503, "no coordinator answers\n")
        with pytest.raises(ProcessFailed, match=rf"metrics\.endpoint 127\.0\.0\.1:{port}: cannot be listened on"):
            Daemon(f"[metrics]\nendpoint = {port}\n", name="n1").start()
    finally:
        assert daemon.stop() == []
        daemon.remove()


@pytest.mark.slow
def test_a_coordinator_whose_port_is_taken_ends_its_daemon_s_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ProcessFailed, match=rf"metrics\.endpoint 127\.0\.0\.1:{port}: cannot be listened on"):
            Daemon(f"[metrics]\nendpoint = {port - 1}\n").start()
