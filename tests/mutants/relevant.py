"""Choose the tests for a mutant: unit and property tests by a map of calls, tests with processes by their words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.mutants.mutate import Place

HOOK = Path(__file__).parent / "hook"
MAPPED = ("tests/unit", "tests/property")
UNMAPPED = ("test_printable.py", "test_benchmarks.py", "test_packaging.py")  # slow, or about the tree's texts
PROCESSES = ("tests/cluster", "refitd/testing/conformance", "tests/spmd")
MAP_TEST_S = 20  # a test that takes longer is not in the map
FIRST_S = 15.0  # seconds of mapped tests that run before whole files
FILES = 6  # unit and property files that run whole
PROCESS_FILES = 2

# Parts of the service that each swap of a cluster test passes.
SWAPPING = (
    "daemon/",
    "coordinator/",
    "worker/",
    "client/",
    "commit/",
    "addressing/",
    "buffers/",
    "copy_services/",
    "protocol/",
)
EXPLORATION = "tests/exploration/test_exploration.py"  # judges the machines of refitd/commit


def make_map(root: Path, folder: Path) -> None:
    """Run some tests of each unit and property file in `root`, and write their calls to the folder."""
    folder.mkdir(parents=True)
    names = [f"--ignore=tests/unit/{name}" for name in UNMAPPED]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sitecustomize", *names]
    environment = {**os.environ, "MUTANTS_MAP": str(folder), "PYTHONPATH": str(HOOK)}
    with open(folder / "said", "wb") as out:
        subprocess.run(
            [*command, f"--timeout={MAP_TEST_S}", *MAPPED], cwd=root, env=environment, stdout=out, check=False
        )


class Relevant:
    """The tests for each function.

    Args:
        root: the tree whose tests run.
        folder: the map, as `make_map` wrote it.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        rows = (line.rsplit("\t", 1) for line in (folder / "passed").read_text().splitlines())
        self.seconds = {test: float(seconds) for test, seconds in rows}
        self.tests = defaultdict[tuple[str, str], set[str]](set)
        for path in folder.glob("*.calls"):
            for line in path.read_text().splitlines():
                test, file, function = line.rsplit("\t", 2)
                if test in self.seconds:
                    self.tests[file, function].add(test)
                    self.tests[file, "<module>"].add(test)
        self.texts = {
            str(path.relative_to(root)): path.read_text()
            for folder_name in PROCESSES
            for path in sorted((root / folder_name).glob("test_*.py"))
        }

    def mapped(self, place: Place) -> list[str]:
        """Return the unit and property tests for a place: the fastest tests, then whole files, fastest first."""
        tests = sorted(self.tests[place.file, place.function], key=lambda test: self.seconds[test])
        first, spent = list[str](), 0.0
        for test in tests:
            spent += self.seconds[test]
            if spent < FIRST_S:
                first.append(test)
        files = defaultdict[str, float](float)
        for test in tests:
            files[test.partition("::")[0]] += self.seconds[test]
        return [*first, *sorted(files, key=lambda file: files[file])[:FILES]]

    def with_processes(self, place: Place) -> list[str]:
        """Return up to two files of tests that start processes, by the words that they share with the place."""
        stem = place.file.removesuffix(".py").removesuffix("/__init__")
        words = {word.rstrip("s") for word in re.split(r"[/_]", stem)}
        name = place.function.rpartition(".")[2]
        scores = dict[str, float]()
        for file, text in self.texts.items():
            title = {word.rstrip("s") for word in re.split(r"[/_.]", file.removeprefix("tests/cluster/"))}
            dotted = "refitd." + stem.replace("/", ".")
            score = 4.0 * len(words & title) + 2.0 * (re.search(rf"\b{re.escape(name)}\b", text) is not None)
            score += 3.0 * (dotted in text) + 1.0 * (dotted.rpartition(".")[0] + " " in text)
            is_swapped = file == "tests/cluster/test_swap.py" and place.file.startswith(SWAPPING)
            is_exchanged = file == "tests/spmd/test_refit.py" and place.file.startswith("inprocess/")
            scores[file] = score + 3.0 * (is_swapped or is_exchanged) - len(text) / 1e6
        best = [file for file in sorted(scores, key=lambda file: -scores[file]) if scores[file] > 1]
        if place.file.startswith("commit/") and (self.root / EXPLORATION).exists():
            best.insert(0, EXPLORATION)
        return best[:PROCESS_FILES]
