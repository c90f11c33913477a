"""Background activity for tests: an engine that polls, and a swap whose phases a test can wait for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from refitd.errors import RefitdError
from refitd.protocol.reports import SwapProgress, SwapReport

if TYPE_CHECKING:
    from refitd.client import Client
    from refitd.client.target import Target

TOKEN_S = 0.002


class Engine:
    """Polls targets on a thread during a block, as an engine does between two tokens.

    Attributes:
        errors: the error that a poll raised, after which polling stops.
    """

    def __init__(self, *targets: Target) -> None:
        """Poll `targets` in this order."""
        self.errors: list[RefitdError] = []
        self._targets = targets
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(TOKEN_S):
            for target in self._targets:
                try:
                    target.poll()
                except RefitdError as exc:
                    self.errors.append(exc)
                    return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)


class RunningSwap:
    """A swap that runs on a thread. A test can wait for its phases.

    Attributes:
        report: the swap's report; None until it has succeeded.
        error: the error that it raised, if any.
    """

    def __init__(self, client: Client, model: str, version: int | None = None, timeout: float = 60.0) -> None:
        """Start the swap; `client` must not be used elsewhere, and is closed at the end."""
        self.report: SwapReport | None = None
        self.error: RefitdError | None = None
        self._client = client
        self._phases: set[str] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(model, version, timeout), daemon=True)
        self._thread.start()

    def _run(self, model: str, version: int | None, timeout: float) -> None:
        try:
            self.report = self._client.swap(model, version, timeout=timeout, on_progress=self._progress)
        except RefitdError as exc:
            self.error = exc
        finally:
            self._client.close()

    def _progress(self, progress: SwapProgress) -> None:
        with self._changed:
            self._phases.add(progress.phase)
            self._changed.notify_all()

    def wait_phase(self, phase: str, timeout: float = 40.0) -> None:
        """Wait until the swap has been in a phase: "plan", "stage", "verify" or "commit".

        Raises:
            AssertionError: it has not reached it within `timeout` seconds.
        """
        with self._changed:
            reached = self._changed.wait_for(lambda: phase in self._phases, timeout)
        assert reached, f"phase {phase} not reached; seen {self._phases}, error {self.error}"

    def result(self, timeout: float = 60.0) -> SwapReport:
        """Wait for the swap's end; return its report.

        Raises:
            RefitdError: the swap failed.
            AssertionError: it has not ended within `timeout` seconds.
        """
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the swap has neither succeeded nor failed"
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report
