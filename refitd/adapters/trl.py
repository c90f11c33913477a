"""Transfer weights from TRL's `AsyncGRPOTrainer(weight_transfer=...)` to vLLM servers that use the refitd backend.

    # vllm serve MODEL --weight-transfer-config '{"backend": "refitd"}'
    transfer = RefitdWeightTransfer("http://localhost:8000")
    trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)

It has the methods of TRL's `WeightTransferProtocol` (1.16), which the trainer's main process calls. Neither TRL nor
vLLM is imported here.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import refitd
from refitd.adapters.driving import Fleet, swap_and_drive
from refitd.adapters.streams import FirstStream

READY_POLL_S = 1.0


class RefitdWeightTransfer:
    """Publishes the tensors that TRL streams, and makes them live in every replica of the model, or in none."""

    def __init__(
        self,
        servers: str | Sequence[str] = (),
        *,
        model: str = "policy",
        runtime_dir: str = "",
        pause: str = "keep",
        engine: dict[str, Any] | None = None,
        cast: torch.dtype | Mapping[str, str | torch.dtype] | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Store the servers to drive; engines that follow by themselves (docs/vllm.md) need not be listed.

        Args:
            servers: base URLs of vLLM servers, started with VLLM_SERVER_DEV_MODE=1.
            model: the model's name in refitd.
            runtime_dir: the daemon's directory; "" is this user's default one.
            pause: the handling of running requests: "keep", "abort" or "wait", as in vLLM's /pause.
            engine: further settings of the engines, as in docs/vllm.md; the default replica name is the server's
                address.
            cast: as in `Client.register_source`; the engines' own type (torch.bfloat16) is the fastest.
            timeout: seconds to wait for a server to be up, and for one version.
        """
        self._servers = (servers,) if isinstance(servers, str) else tuple(servers)
        self._model, self._runtime_dir, self._pause, self._timeout = model, runtime_dir, pause, timeout
        self._engine, self._cast = engine or {}, cast
        self._pauses_late = False
        self._client: refitd.Client | None = None
        self._source: refitd.StreamedSource | None = None

    def init_weight_transfer(self) -> None:
        """Connect to the daemon, and wait until the servers are up."""
        self._client = refitd.connect(self._runtime_dir or None, name="trl")
        self._fleet = Fleet(self._client, self._model)
        deadline = time.monotonic() + self._timeout
        for server in self._servers:
            while not _is_up(server):
                if time.monotonic() > deadline:
                    raise refitd.DeadlineExceeded(f"{server} is not up after {self._timeout:.0f} s")
                time.sleep(READY_POLL_S)

    def pause(self) -> None:
        """Pause the servers: with "wait" now, else only for the commit, while `send_weights` runs."""
        self._pauses_late = self._pause != "wait"
        if not self._pauses_late:
            self._post("pause", query="?mode=wait")

    def resume(self) -> None:
        """Resume the servers."""
        self._pauses_late = False
        self._post("resume")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the iterator's tensors, one at a time, and return once they are live everywhere.

        The first time, all tensors are copied into main memory, because shapes are registered at the iterator's end.

        Raises:
            RefusedError, SwapFailed: the version is not live; the servers keep serving the old one.
        """
        if self._client is None:
            raise refitd.RefusedError("init_weight_transfer has not been called")
        weights: Iterator[tuple[str, torch.Tensor]] = iterator
        if self._source is None:
            first = FirstStream(iterator)
            shapes, weights = first.shapes, first.drained()
            self._source = self._client.declare_source(self._model, shapes, cast=self._cast, timeout=self._timeout)
        version = self._source.next_version
        if self._servers:  # before publishing, because that rounds tensors that no engine needs unrounded
            self._fleet.prepare(self._init_engines, self._catch_up)
        self._source.publish_from(version, weights, timeout=self._timeout)
        swap_and_drive(
            self._client,
            self._model,
            version,
            lambda: self._update(version),
            wait=self._timeout,
            timeout=self._timeout,
        )

    def destroy(self) -> None:
        """Close this trainer's connection and source; the servers keep serving."""
        client, source, self._client, self._source = self._client, self._source, None, None
        if source is not None:
            with contextlib.suppress(refitd.RefitdError):  # the daemon may be lost
                source.close()
        if client is not None:
            client.close()

    def _init_engines(self) -> None:
        for server in self._servers:
            replica = server.partition("//")[2].rstrip("/") or server
            settings = {"model": self._model, "replica": replica, **self._engine}
            self._request(server, "init_weight_transfer_engine", {"init_info": settings})

    def _catch_up(self) -> None:
        self._post("start_weight_update")  # commits a pending version
        self._post("finish_weight_update")

    def _update(self, version: int) -> None:
        """Pause all servers and commit the version, in parallel."""
        with ThreadPoolExecutor(max(1, len(self._servers))) as each:
            list(each.map(lambda server: self._update_one(server, version), self._servers))

    def _update_one(self, server: str, version: int) -> None:
        if self._pauses_late:
            self._request(server, f"pause?mode={self._pause}", {})
        self._request(server, "start_weight_update", {})
        self._request(server, "update_weights", {"update_info": {"version": version}})
        self._request(server, "finish_weight_update", {})

    def _post(self, path: str, query: str = "") -> None:
        for server in self._servers:
            self._request(server, path + query, {})

    def _request(self, server: str, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            f"{server.rstrip('/')}/{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                answer.read()
        except urllib.error.HTTPError as exc:
            said = exc.read(2000).decode(errors="replace")
            hint = "; is VLLM_SERVER_DEV_MODE=1 set there?" if exc.code == 404 else ""
            raise refitd.RefusedError(f"{server}/{path} answered {exc.code}: {said}{hint}") from exc
        except OSError as exc:
            raise refitd.TransportError(f"{server}/{path}: {exc}") from exc


def _is_up(server: str) -> bool:
    try:
        with urllib.request.urlopen(f"{server.rstrip('/')}/health", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
