"""In the middle of a swap, kill a vLLM server that follows; its supervisor restarts it; prints JSON.

    rank killed before the decision    the swap aborts, the fleet serves the old version, so does the next server
    rank killed after the decision     the fleet serves the new version, and the next server is caught up to it

The next swap reaches the server in both cases. Only the supervisor acts on the server. Last, the trainer leaves in the
middle of a swap.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engines.server import Server
from benchmarks.engines.vllm_case import PROMPT, checkpoint, daemon

PROMPT_TOKENS = PROMPT[0]["prompt_token_ids"]
BACK_S = 240.0  # a server's start, and its registration


class Supervisor:
    """Starts a server, and starts it again whenever it ends."""

    def __init__(self, start: Callable[[int], Server]) -> None:
        self._start, self.starts = start, 1
        self.server = start(1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.2):
            if self.server.has_ended():
                self.server.close()
                self.starts += 1
                self.server = self._start(self.starts)

    def close(self) -> None:
        """End the server, and do not restart it."""
        self._over.set()
        self._thread.join()
        self.server.close()


class Survivor:
    """Another replica, in this process, which must survive when the server is killed.

    Attributes:
        holds: while cleared, its pause is delayed, and with it the decision.
        is_asked: set while a swap waits for its pause.
    """

    def __init__(self, client: Any, weights: dict[str, Any]) -> None:
        import torch

        self.holds, self.is_asked = threading.Event(), threading.Event()
        self.holds.set()
        tensors = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.target = client.register_target("policy", tensors, replica="b")
        client.control_replica("policy", "b", pause=self._pause, commit=lambda version: self.target.poll())

    def _pause(self, version: int) -> None:
        self.is_asked.set()
        self.holds.wait(60)
        self.is_asked.clear()


def run(tp: int) -> dict[str, Any]:
    """Return the results."""
    import refitd

    work = Path(tempfile.mkdtemp(prefix="rfdr"))
    os.chmod(work, 0o700)
    try:
        nbytes = checkpoint("llama", "tiny", work / "model")
        with (
            daemon(work),
            refitd.connect(work, name="trainer") as trainer,
            refitd.connect(work, name="b") as other,
            refitd.connect(work) as client,
        ):
            found = _killed(client, trainer, other, work, tp)
        return {"engine": f"llama TP{tp}, follows, killed in swaps and restarted", "bytes": nbytes, **found}
    except BaseException:
        for log in sorted(work.glob("vllm*.log")):
            said = [line for line in log.read_text().splitlines() if "leaked" not in line]
            print(f"--- {log.name}", *said[-40:], sep="\n", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _killed(client: Any, trainer: Any, other: Any, work: Path, tp: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    folder = work / "model"
    weights = {name: w.clone() for name, w in load_file(folder / "model.safetensors").items()}
    source = trainer.register_source("policy", weights)
    survivor = Survivor(other, weights)

    def start(number: int) -> Server:
        return Server(folder, work, tp, log=f"vllm-{number}.log", follow=True, replica="a")

    supervisor = Supervisor(start)
    versions = Versions(client, source, weights, folder, work)
    back: list[float] = []
    try:
        supervisor.server.wait(BACK_S)
        versions.registered(tp)
        versions.swap()
        told = [versions.is_served(supervisor.server, tp)]
        old = versions.last

        # killed before the decision: the other replica has not paused yet
        survivor.holds.clear()
        swap = versions.begin()
        assert survivor.is_asked.wait(60), "the swap has not come to its pause"
        killed = time.monotonic()
        os.kill(versions.ranks()[-1], signal.SIGKILL)
        failed = swap.failed()
        survivor.holds.set()
        assert failed.report.outcome == "aborted" and f"a rank {tp - 1} " in str(failed), failed
        assert survivor.target.version == old
        versions.back(old, tp)
        back.append(time.monotonic() - killed)
        supervisor.server.wait(BACK_S)
        told.append(versions.is_served(supervisor.server, tp, old))
        versions.swap(again=True)
        told.append(versions.is_served(supervisor.server, tp))

        # killed after the decision: the rank is stopped, and cannot commit the version
        stopped = versions.ranks()[-1]
        os.kill(stopped, signal.SIGSTOP)
        swap = versions.begin()
        _until(lambda: survivor.target.version == versions.last, 60, "the decision")
        killed = time.monotonic()
        os.kill(stopped, signal.SIGKILL)
        failed = swap.failed()
        assert failed.report.outcome == "incomplete" and f"a rank {tp - 1} " in str(failed), failed
        versions.back(versions.last, tp)
        back.append(time.monotonic() - killed)
        supervisor.server.wait(BACK_S)
        told.append(versions.is_served(supervisor.server, tp))
        versions.swap()
        told.append(versions.is_served(supervisor.server, tp))

        # the trainer leaves before the decision: its published version stays, and goes live
        survivor.holds.clear()
        swap = versions.begin()
        assert survivor.is_asked.wait(60), "the swap has not come to its pause"
        trainer.close()
        survivor.holds.set()
        swap.succeeded()
        told.append(versions.is_served(supervisor.server, tp))
        verified = str(client.verify("policy").outcome)
    finally:
        supervisor.close()
    return {
        "equal": all(told) and supervisor.starts == 3,
        "verified": verified,
        "tensors": len(weights),
        "back_s": max(back),
    }


class Versions:
    """The trainer's versions; each is also saved as a checkpoint, which the engine reloads for comparison."""

    def __init__(self, client: Any, source: Any, weights: dict[str, Any], folder: Path, work: Path) -> None:
        self._client, self._source, self._weights, self._work = client, source, weights, work
        self._folder = folder
        self.last = 0

    def _publish(self) -> None:
        import torch
        from safetensors.torch import save_file

        self.last = self._source.next_version
        generator = torch.Generator().manual_seed(self.last)
        for w in self._weights.values():
            w.add_(torch.randn(w.shape, generator=generator).to(w.dtype), alpha=0.02)
        saved = self._saved(self.last)
        saved.mkdir()
        for file in self._folder.glob("*.json"):
            shutil.copy(file, saved)
        save_file(self._weights, saved / "model.safetensors")
        self._source.publish(self.last)

    def _saved(self, version: int) -> Path:
        return self._work / f"saved-{version}"

    def swap(self, *, again: bool = False) -> None:
        """Make the next version live everywhere; with `again`, the last version."""
        if not again:
            self._publish()
        self._client.swap("policy", self.last, wait=60, queue=True)

    def begin(self) -> Swap:
        """Publish the next version, and swap on another thread."""
        self._publish()
        return Swap(self._client, self.last)

    def _targets(self) -> list[Any]:
        (model,) = self._client.status().models
        return [target for target in model.targets if target.replica == "a"]

    def ranks(self) -> list[int]:
        """Return the processes of the server's ranks."""
        return [target.pid for target in sorted(self._targets(), key=lambda target: target.rank)]

    def registered(self, tp: int) -> None:
        """Return once the server's ranks have registered."""
        _until(lambda: len(self._targets()) == tp, 60, "the server to register")

    def back(self, version: int, tp: int) -> None:
        """Return once a server serves a version, with all its ranks."""

        def serves() -> bool:
            return [target.version for target in self._targets()] == [version] * tp

        _until(lambda: not serves(), 30, "the killed server to be missed")
        _until(serves, BACK_S, f"the next server to serve version {version}")

    def is_served(self, server: Server, tp: int, version: int | None = None) -> bool:
        """Whether the server has a version's weights: its reload of the version's file must give equal weights."""
        version = self.last if version is None else version
        mine, told = server.checksums(), server.tokens(PROMPT_TOKENS, 8)
        path = {"weights_path": str(self._saved(version))}
        server.post("collective_rpc", {"method": "reload_weights", "kwargs": path})
        return len(mine) == tp and (mine, told) == (server.checksums(), server.tokens(PROMPT_TOKENS, 8))


class Swap:
    """A swap on another thread."""

    def __init__(self, client: Any, version: int) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(client, version), daemon=True)
        self._thread.start()

    def _run(self, client: Any, version: int) -> None:
        try:
            client.swap("policy", version, wait=60)
        except Exception as exc:
            self._error = exc

    def failed(self) -> Any:
        """Return the error of the swap."""
        self._thread.join(90)
        assert self._error is not None, "the swap has not failed, or not ended"
        return self._error

    def succeeded(self) -> None:
        """Return once the swap has succeeded."""
        self._thread.join(90)
        assert self._error is None and not self._thread.is_alive(), self._error


def _until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(i) for i in range(int(sys.argv[1]))))
    print(json.dumps(run(int(sys.argv[1]))), flush=True)
