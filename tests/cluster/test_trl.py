"""TRL's transfer drives vLLM servers: they pause as configured, and commit the version between start and finish."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

import refitd
from refitd.adapters.trl import RefitdWeightTransfer
from refitd.testing import Daemon

pytestmark = pytest.mark.own_daemon

COMMIT = ["start_weight_update", "update_weights", "finish_weight_update"]


class Server(ThreadingHTTPServer):
    """A vLLM server by its interface: `requests` lists the paths; an update commits the pending version."""

    def __init__(self, target: refitd.Target) -> None:
        self.target, self.requests = target, list[str]()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(200)  # /health

    def do_POST(self) -> None:
        path = self.path.removeprefix("/")
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(path)
        if path == "update_weights":
            self.server.target.wait((self.server.target.version or 0) + 1, timeout=30)
        self._answer(200)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print no line for each request."""


@contextmanager
def serving(daemon: Daemon) -> Iterator[tuple[Server, torch.Tensor]]:
    mine = torch.zeros(4)
    with daemon.connect("engine") as engine:
        server = Server(engine.register_target("policy", {"w": mine}, replica="a"))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server, mine
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.mark.parametrize("pause", ["keep", "abort", "wait"])
def test_servers_pause_before_the_trainer_sends_with_wait_and_else_only_for_the_commit(
    daemon: Daemon, pause: str
) -> None:
    with serving(daemon) as (server, mine):
        transfer = RefitdWeightTransfer(server.url, runtime_dir=str(daemon.directory), pause=pause, timeout=30.0)
        transfer.init_weight_transfer()
        transfer.pause()
        assert server.requests == (["pause?mode=wait"] if pause == "wait" else [])
        server.requests.clear()
        transfer.send_weights(iter([("w", torch.ones(4))]))
        assert torch.equal(mine, torch.ones(4))
        late = [] if pause == "wait" else [f"pause?mode={pause}"]
        assert server.requests == ["init_weight_transfer_engine", *late, *COMMIT]
        server.requests.clear()
        transfer.resume()
        assert server.requests == ["resume"]
        transfer.send_weights(iter([("w", torch.full((4,), 2.0))]))  # without a pause: the trainer wants none
        assert torch.equal(mine, torch.full((4,), 2.0))
        assert server.requests == ["resume", *COMMIT]
        transfer.destroy()
