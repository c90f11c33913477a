"""Mutate places of refitd/ chosen by a seed, run the tests for each, and list the mutants that no test notices.

The tree at --root is changed while this runs, one file at a time, and restored after each mutant. The first run makes
the map of calls (minutes). A line for each mutant is printed when it has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.mutants import mutate, relevant

TEST_S = 20  # a test that takes longer fails
RESULTS = ("killed", "import", "survived")


class Run(NamedTuple):
    """One run of pytest: its exit status (None: it took too long) and the tests that failed."""

    status: int | None
    failed: list[str]


class _Recorder:
    """A plugin of pytest that writes the failed tests to a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _note(self, report: Any) -> None:
        if report.failed:
            with open(self._path, "a") as out:
                out.write(report.nodeid + "\n")

    pytest_runtest_logreport = pytest_collectreport = _note


def _preload() -> None:
    """Import what all tests import, because a forked child then starts in no time."""
    for name in (
        "torch",
        "numpy",
        "msgspec",
        "msgpack",
        "zmq",
        "hypothesis",
        "cryptography.fernet",
        "pytest",
        "xxhash",
    ):
        with contextlib.suppress(ImportError):
            __import__(name)


def _child(root: Path, arguments: list[str], failed: str, output: str) -> NoReturn:
    """Run pytest in a forked process with the root's tests in place of this tool's tree."""
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(root)
        sys.path[0] = str(root)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}"]
        status = int(pytest.main([*options, *arguments], plugins=[_Recorder(failed)]))
    finally:
        os._exit(status)


def _end_leftovers(mark: str) -> None:
    """Kill the processes that a run has left."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)


def run_tests(root: Path, arguments: list[str], limit_s: float) -> Run:
    """Run pytest in a forked process until the first failure, for at most `limit_s`."""
    mark = f"MUTANTS_RUN={os.getpid()}"
    os.environ["MUTANTS_RUN"] = str(os.getpid())
    with tempfile.TemporaryDirectory() as folder:
        failed = Path(folder, "failed")
        failed.touch()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _child(root, arguments, str(failed), f"{folder}/output")
        until, status = time.monotonic() + limit_s, None
        try:
            while status is None and time.monotonic() < until:
                done, code = os.waitpid(pid, os.WNOHANG)
                if done:
                    status = os.waitstatus_to_exitcode(code)
                else:
                    time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if status is None:
                os.waitpid(pid, 0)
            _end_leftovers(mark)
        return Run(status, failed.read_text().splitlines())


@contextlib.contextmanager
def applied(path: Path, text: str, number: int) -> Any:
    """Replace a file while the block runs. It gets a new time of change: no compiled file fits it."""
    before, times = path.read_text(), path.stat()
    try:
        path.write_text(text)
        os.utime(path, (times.st_mtime + number + 1,) * 2)
        yield
    finally:
        path.write_text(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def judge(
    root: Path, place: mutate.Place, number: int, tests: relevant.Relevant, limit_s: float, broken: set[str]
) -> dict[str, Any]:
    """Return the result for one mutant. `broken` collects tests that also fail on clean code: they kill no mutant."""
    path = root / "refitd" / place.file
    text = mutate.mutated(path.read_text(), place)
    result: dict[str, Any] = {"place": str(place), "kind": place.kind, "result": "survived", "by": "", "notes": []}
    began = time.monotonic()
    rounds = [tests.mapped(place), tests.with_processes(place)]
    while rounds:
        if not (arguments := rounds.pop(0)):
            result["notes"].append("no tests")
            continue
        with applied(path, text, number):
            run = run_tests(root, [*arguments, *(f"--deselect={test}" for test in sorted(broken))], limit_s)
        if run.status is None:
            result["notes"].append(f"stopped after {limit_s:.0f} s")
        if run.status in (None, 0, 5):
            continue
        is_import = run.status != 1 or any("::" not in test for test in run.failed)
        again = ["--collect-only", *arguments] if is_import else run.failed
        if run_tests(root, again, limit_s).status != 0:
            result["notes"].append(f"fails without the mutant: {run.failed[:1]}")
            if not is_import and not broken.issuperset(run.failed):
                broken.update(run.failed)
                rounds.insert(0, arguments)
            continue
        result |= {"result": "import" if is_import else "killed", "by": (run.failed or ["?"])[0]}
        break
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def share(killed: int, total: int) -> str:
    """Return a share with its 95 % interval (Wilson)."""
    if not total:
        return "-"
    z, p = 1.96, killed / total
    middle, width = p + z * z / (2 * total), z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    low, high = ((middle - width) / (1 + z * z / total), (middle + width) / (1 + z * z / total))
    return f"{p:.0%} (95 %: {low:.0%} to {high:.0%})"


def main() -> None:
    """Judge the chosen mutants in the order of the draw; print the share of killed ones."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="a clean checkout with its own .venv")
    parser.add_argument("--seed", type=int, default=30)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--skip", type=int, default=0, help="places of the draw that were judged before")
    parser.add_argument("--map", type=Path, help="folder of the map of calls; default: build/mutants of the root")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="limit for unit tests, and for tests with processes"
    )
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no mutant after this time")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each mutant")
    asked = parser.parse_args()
    root = asked.root.resolve()
    if subprocess.run(["git", "diff", "--quiet", "--", "refitd"], cwd=root, check=False).returncode:
        sys.exit(
            f"{root}/refitd: has changes that are not committed, and this run would change files; commit them first"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `applied` then restores the file
    folder = asked.map or root / "build" / "mutants"
    if not (folder / "passed").exists():
        relevant.make_map(root, folder)
    tests = relevant.Relevant(root, folder)
    sources = {str(path.relative_to(root / "refitd")): path.read_text() for path in root.glob("refitd/**/*.py")}
    _preload()
    count, broken, end = Counter[str](), set[str](), time.monotonic() + 60 * asked.minutes
    for number, place in enumerate(mutate.choose(sources, asked.seed, asked.count)):
        if number < asked.skip:
            continue
        if time.monotonic() > end:
            break
        result = judge(root, place, number, tests, asked.seconds, broken)
        count[result["result"]] += 1
        line = (
            f"{number} {result['result']} ({result['seconds']} s) {result['place']}  [{result['by']}] {result['notes']}"
        )
        print(json.dumps({"number": number, **result}) if asked.json else line, flush=True)
    total = sum(count.values())
    said = ", ".join(f"{name} {count[name]}" for name in RESULTS)
    print(f"seed {asked.seed}, {total} mutants: {said}; {share(total - count['survived'], total)}", file=sys.stderr)


if __name__ == "__main__":
    main()
