"""TRL: a weight transfer for `AsyncGRPOTrainer(weight_transfer=...)`, into vLLM servers that have the refitd backend.

    # vllm serve MODEL --weight-transfer-config '{"backend": "refitd"}'
    transfer = RefitdWeightTransfer("http://localhost:8000")
    trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)

It has the methods of TRL's `WeightTransferProtocol` (1.16), which the trainer's main process calls. Neither TRL nor
vLLM is imported here.
"""

from __future__ import annotations

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

READY_POLL_S = 1.0


class RefitdWeightTransfer:
    """Publishes what TRL streams, and makes it live in every replica of the model, or in none."""

    def __init__(
        self,
        servers: str | Sequence[str] = (),
        *,
        model: str = "policy",
        directory: str = "",
        pause: str = "keep",
        engine: dict[str, Any] | None = None,
        cast: torch.dtype | Mapping[str, str | torch.dtype] | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Name the servers to drive; engines that follow by themselves (docs/vllm.md) need not be named.

        Args:
            servers: base URLs of vLLM servers, started with VLLM_SERVER_DEV_MODE=1.
            model: the model's name in refitd.
            directory: the daemon's directory; "" is this user's default one.
            pause: what becomes of running requests: "keep", "abort" or "wait", as vLLM's /pause takes it.
            engine: further settings of the engines, as in docs/vllm.md; the replica is named by the server's address.
            cast: as in `Client.register_source`; the engines' own type (torch.bfloat16) is the fastest.
            timeout: seconds for a server to be up, and for one version.
        """
        self._servers = (servers,) if isinstance(servers, str) else tuple(servers)
        self._model, self._directory, self._pause, self._timeout = model, directory, pause, timeout
        self._engine, self._cast = engine or {}, cast
        self._pauses_late = False
        self._client: refitd.Client | None = None
        self._source: refitd.StreamedSource | None = None

    def init_weight_transfer(self) -> None:
        """Connect to the daemon, and wait until the servers are up."""
        self._client = refitd.connect(self._directory or None, name="trl")
        self._fleet = Fleet(self._client, self._model)
        deadline = time.monotonic() + self._timeout
        for server in self._servers:
            while not _is_up(server):
                if time.monotonic() > deadline:
                    raise refitd.DeadlineExceeded(f"{server} is not up after {self._timeout:.0f} s")
                time.sleep(READY_POLL_S)

    def pause(self) -> None:
        """Have the servers stand still; with "wait" now, else for the commit alone, while `send_weights` runs."""
        self._pauses_late = self._pause != "wait"
        if not self._pauses_late:
            self._post("pause", query="?mode=wait")

    def resume(self) -> None:
        """Have the servers go on."""
        self._pauses_late = False
        self._post("resume")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish what the iterator yields, one tensor at a time, and return once it is live everywhere.

        The first time, all tensors are held until the last one has come: their shapes are registered then.

        Raises:
            RefusedError, SwapFailed: nothing has changed, and the servers serve what they have served.
        """
        if self._client is None:
            raise refitd.RefusedError("init_weight_transfer has not been called")
        weights: Iterator[tuple[str, torch.Tensor]] = iterator
        if self._source is None:
            first = list(weights)
            shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in first}
            self._source = self._client.declare_source(self._model, shapes, cast=self._cast, timeout=self._timeout)
            weights = iter(first)
        version = self._source.next_version
        if self._servers:  # before the publication, which rounds what no engine needs unrounded
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
        """End this trainer's part; the servers serve on."""
        client, self._client, self._source = self._client, None, None
        if client is not None:
            client.close()

    def _init_engines(self) -> None:
        for server in self._servers:
            replica = server.partition("//")[2].rstrip("/") or server
            settings = {"model": self._model, "replica": replica, **self._engine}
            self._request(server, "init_weight_transfer_engine", {"init_info": settings})

    def _catch_up(self) -> None:
        self._post("start_weight_update")  # takes over what is pending
        self._post("finish_weight_update")

    def _update(self, version: int) -> None:
        """Have all servers stand still and take the version over, at the same time."""
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
