"""gpu-check of the daemon's part: arenas on a GPU owned by a real daemon, swaps between them, a worker that is killed.

Run as: service_checks.py NAME SECONDS, which prints one JSON object, as checks.py does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def running_daemon(seconds: float) -> Iterator[Path]:
    """A standalone daemon of its own; yields its directory. Its log goes to stderr."""
    with tempfile.TemporaryDirectory(prefix="rfg") as folder:
        Path(folder, "refitd_cli").symlink_to(ROOT / "cli")  # which is installed under this name
        directory, config = Path(folder, "run"), Path(folder, "node.toml")
        deadlines = f"plan_s = {seconds}\nstage_s = {seconds}\ncommit_s = {seconds}\n"
        config.write_text(f'[node]\nname = "n0"\nruntime_dir = "{directory}"\n[deadlines]\n{deadlines}')
        path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
        ready_r, ready_w = os.pipe()
        command = [sys.executable, "-m", "refitd_cli.daemon", "serve", "--config", str(config)]
        daemon = subprocess.Popen(
            [*command, "--ready-fd", str(ready_w), "--standalone"],
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=[ready_w],
            stdout=sys.stderr,
        )
        os.close(ready_w)
        try:
            assert os.read(ready_r, 16) == b"ready\n", "the daemon did not start"  # ends with the daemon at the latest
            yield directory
        finally:
            os.close(ready_r)
            daemon.terminate()
            try:
                assert daemon.wait(20) == 0
            finally:
                daemon.kill()
                daemon.wait()


def eventually(claim: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


def used() -> int:
    """Bytes of the GPU that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def daemon_arenas(seconds: float, count: int = 16) -> dict[str, object]:
    """Two shards in arenas on the GPU: swaps, a killed worker, memory given back, refusals; returns figures."""
    import refitd
    from refitd.errors import ArenaError, RefitFailed

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    shape = (4096, 4096)  # 32 MiB of bfloat16
    wanted = {f"layers.{i}.weight": (shape, torch.bfloat16) for i in range(count)}
    nbytes = 2 * count * shape[0] * shape[1]
    figures: dict[str, object] = {"MiB": nbytes / MIB}
    before = used()
    with running_daemon(seconds) as directory, refitd.connect(directory) as client:
        given, live = client.allocate(wanted, device="cuda:0"), client.allocate(wanted, device="cuda:0")
        assert used() - before >= 2 * nbytes, "the arenas are not on the GPU"
        pointers = [t.data_ptr() for t in live.values()]
        source = client.register_source("policy", given)
        target = client.register_target("policy", live, replica="engine")
        (gpu,) = client.status().nodes[0].gpus
        assert gpu.arena_bytes >= 3 * nbytes, gpu

        def fill(tensors: dict[str, torch.Tensor], version: int) -> None:
            for i, tensor in enumerate(tensors.values()):
                tensor.fill_(version + i / 8)

        def serves(tensors: dict[str, torch.Tensor], version: int) -> bool:
            return all(bool((t == version + i / 8).all()) for i, t in enumerate(tensors.values()))

        def swap(version: int) -> float:
            with source.lend(version), Poller(target):
                return client.swap("policy", version, timeout=seconds).stage_s

        took = []
        for version in range(1, 5):
            fill(given, version)
            took.append(swap(version))
            assert serves(live, version), f"version {version} is not what was lent"
        figures["first stage s"] = took[0]
        figures["stage GB/s"] = nbytes / statistics.median(took[1:]) / 1e9

        # a worker dies while it stages: the old version stays, the arenas too, a fresh worker goes on
        fill(given, 5)
        workers = client.status().nodes[0].workers
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        with source.lend(5):
            import threading

            failed: list[RefitFailed] = []

            def doomed() -> None:
                try:
                    client.swap("policy", 5, timeout=seconds)
                except RefitFailed as exc:
                    failed.append(exc)

            thread = threading.Thread(target=doomed)
            thread.start()
            eventually(lambda: client.status().models[0].swap is not None, "the swap has begun", seconds)
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            thread.join(seconds)
        assert failed and "SIGKILL" in str(failed[0]), failed
        assert serves(live, 4), "an aborted swap has changed the live tensors"
        fill(given, 6)
        swap(6)
        assert serves(live, 6) and pointers == [t.data_ptr() for t in live.values()]

        # a snapshot in main memory for the same engine, and private CUDA tensors from the same trainer
        source.close()
        host = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in wanted.items()}
        fill(host, 7)
        source = client.register_source("policy", host, slots=1)
        source.publish(7)
        with Poller(target):
            report = client.swap("policy", 7, timeout=seconds)
        assert serves(live, 7)
        figures["from main memory GB/s"] = nbytes / report.stage_s / 1e9
        own = {name: torch.zeros(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in wanted.items()}
        private = client.register_target("policy", own, replica="private")
        with Poller(target, private):
            source.publish(8)
            client.swap("policy", 8, timeout=seconds)
        assert serves(own, 7) and private.version == 8

        free = torch.cuda.mem_get_info(0)[0]
        try:
            client.allocate({"w": ((free + 64 * MIB,), torch.uint8)}, device="cuda:0")
            raise AssertionError("more than there is was given")
        except ArenaError as exc:
            assert "bytes asked for on GPU 0" in str(exc), exc
        try:
            client.allocate({"w": ((8,), torch.uint8)}, device=f"cuda:{torch.cuda.device_count()}")
            raise AssertionError("a GPU that is not there was given")
        except ArenaError as exc:
            assert "there is no GPU" in str(exc), exc
        del given, live, own
    torch.cuda.empty_cache()
    eventually(lambda: used() - before < 256 * MIB, "the daemon's memory of the GPU is free again", 30.0)
    return figures


class Poller:
    """Polls targets on a thread, as an engine does between two tokens."""

    def __init__(self, *targets: object) -> None:
        import threading

        self._targets = targets
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.0005):
            for target in self._targets:
                target.poll()  # type: ignore[attr-defined]

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)


CHECKS = {"daemon-arenas": daemon_arenas}


def main() -> int:
    name, seconds = sys.argv[1], float(sys.argv[2])
    try:
        figures = CHECKS[name](seconds * 0.8)
        found = {"state": "passed", "why": "", "figures": figures}
    except BaseException as exc:  # the table says it
        traceback.print_exc()
        found = {"state": "failed", "why": f"{type(exc).__name__}: {exc}"[:500], "figures": {}}
    print(json.dumps(found))
    return int(found["state"] == "failed")


if __name__ == "__main__":
    sys.exit(main())
