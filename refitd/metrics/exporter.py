"""Serves the metrics, health and readiness of one process; its loop counts and publishes, and never waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from refitd import __version__
from refitd.metrics.http import HttpServer, Page

S = TypeVar("S")
M = TypeVar("M", bound=MetricWrapperBase)

# A page is rendered at most this often, and cached between.
FRESH_S = 0.5

# A loop that has not published for this long hangs. It publishes every second.
SILENT_S = 10.0

# Limit on label combinations of a metric whose labels peers choose. Further ones are counted together.
MAX_SERIES = 4096
OTHER = "other"


def add_build_info(registry: CollectorRegistry) -> None:
    """Add the metric that both processes have."""
    info = Gauge("refitd_build_info", "1, with the version of refitd.", ["version"], registry=registry)
    info.labels(__version__).set(1)


class Exporter(Generic[S]):
    """`/metrics`, `/healthz` and `/readyz` of one process.

    Counters and histograms of `registry` are increased by the process's loop. Gauges are set on the server's thread,
    by `show`, from the snapshot that the loop published last.
    """

    def __init__(
        self, address: tuple[str, int], names: Collection[str], registry: CollectorRegistry, show: Callable[[S], None]
    ) -> None:
        """Listen; see HttpServer.

        Raises:
            RefusedError: the address cannot be listened on.
        """
        self._registry, self._show = registry, show
        disable_created_metrics()  # a second series for each counter, without users
        self._published: tuple[S, str, float] | None = None
        self._page, self._made_at = Page(b""), -FRESH_S
        ProcessCollector(registry=registry)
        routes = {"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._readiness}
        self._server = HttpServer(address, names, routes, "metrics.endpoint")
        host, port = self._server.address
        self.endpoint = f"{f'[{host}]' if ':' in host else host}:{port}"

    def publish(self, snapshot: S, lacks: str) -> None:
        """Replace the snapshot, which must not change later; `lacks` is why the process is not ready, "" if it is.

        Called by the loop.
        """
        self._published = snapshot, lacks, time.monotonic()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def _metrics(self) -> Page:
        if time.monotonic() - self._made_at >= FRESH_S:
            if self._published is not None:
                self._show(self._published[0])
            self._page = Page(generate_latest(self._registry), content_type=CONTENT_TYPE_LATEST)
            self._made_at = time.monotonic()
        return self._page

    def _hangs(self) -> str:
        if self._published is None:
            return "it is starting"
        silent_s = time.monotonic() - self._published[2]
        return f"its loop has not turned for {silent_s:.0f} s" if silent_s > SILENT_S else ""

    def _health(self) -> Page:
        return _judged(self._hangs())

    def _readiness(self) -> Page:
        return _judged(self._hangs() or (self._published[1] if self._published is not None else ""))


def _judged(problem: str) -> Page:
    return Page(f"{problem or 'ok'}\n".encode(errors="replace"), 503 if problem else 200)


class Labelled(Generic[M]):
    """At most MAX_SERIES series of one metric with labels."""

    def __init__(self, metric: M) -> None:
        self._metric = metric
        self._series: dict[tuple[str, ...], M] = {}

    def of(self, *values: str) -> M:
        """Return the series with these label values; beyond the limit, the series whose values are all OTHER."""
        found = self._series.get(values)
        if found is None:
            known = values if len(self._series) < MAX_SERIES else (OTHER,) * len(values)
            found = self._series.setdefault(known, self._metric.labels(*known))
        return found
