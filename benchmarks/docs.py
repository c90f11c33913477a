"""Twenty tasks, each answered from docs/README.md without a search: pages that are opened, and words on the way.

A reader scans the index to a row, scans the headings of its page, and reads one section down to the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine

ROOT = Path(__file__).parents[1]
SCANNED, READ = 10.0, 4.0  # words a second: of rows and headings, and of text (240 a minute)
LIMIT_S, PAGES = 60.0, 2


@dataclass(frozen=True)
class Task:
    """A question, words of its row in the index, the page that this row links, a heading there, words of the answer."""

    asks: str
    row: str
    page: str
    heading: str
    answer: str


OPERATE, RUNBOOK, USE = (
    "install, configure, run on several hosts",
    "understand an alarm",
    "write a trainer or an engine",
)
TASKS = (
    Task("open firewall ports", OPERATE, "operate.md", "Open ports", "node.worker_ports"),
    Task(
        "write a CopyService",
        "write a copy service",
        "../examples/copy_service/README.md",
        "1. The package",
        "entry-points",
    ),
    Task("find out why a node vanished", RUNBOOK, "runbook.md", "Find the cause of a symptom", "lost 35 s ago"),
    Task("set a model setting in a container", OPERATE, "operate.md", "Configure", "REFITD_MODELS="),
    Task("upgrade one node", OPERATE, "operate.md", "Upgrade", "refitctl drain n1"),
    Task("estimate memory", OPERATE, "operate.md", "Estimate memory", "max_arena_bytes"),
    Task("return to the previous version", RUNBOOK, "runbook.md", "Do daily work", "refitctl rollback"),
    Task("take a node out of service", OPERATE, "operate.md", "Drain a node", "refitctl drain"),
    Task(
        "engine and trainer use other names", RUNBOOK, "runbook.md", "Find the cause of a symptom", "names do not match"
    ),
    Task("have Prometheus read metrics", "watch it", "metrics.md", "Serve metrics", "endpoint ="),
    Task("set up alerts", "watch it", "metrics.md", "Set up alerts", "refitd.rules.yml"),
    Task("let an engine sleep", USE, "use.md", "Put an engine to sleep", "suspend"),
    Task("shorten the pause of an engine", OPERATE, "operate.md", "Tune", "client.adopt"),
    Task("admit a new host", RUNBOOK, "runbook.md", "Do daily work", "refitctl reload"),
    Task("save the live version as a checkpoint", USE, "use.md", "Publish and save checkpoints", "save_checkpoint"),
    Task("serve with vLLM", "use vLLM", "vllm.md", "Start a server", "weight-transfer-config"),
    Task("send fp32 weights to a bf16 engine", USE, "use.md", "Convert between dtypes", "cast=True"),
    Task(
        "survive the loss of the coordinator's host",
        OPERATE,
        "operate.md",
        "Run a coordinator with standbys",
        "journal =",
    ),
    Task("run on Kubernetes", OPERATE, "operate.md", "Run on Kubernetes", "kubectl apply"),
    Task(
        "predict a refit's time without a cluster",
        "plan or simulate",
        "manifests.md",
        "Simulate the time",
        "refitctl simulate",
    ),
)


def _words(text: str) -> int:
    return len(re.findall(r"[\w'.-]*\w", text))


def measured(task: Task) -> dict[str, Any]:
    """Return a task's pages and seconds; raises AssertionError if the way leads nowhere."""
    index = (ROOT / "docs/README.md").read_text()
    row = next((line for line in index.splitlines() if line.startswith("|") and task.row in line), "")
    assert f"({task.page})" in row, f"{task.asks}: the index has no row {task.row!r} that links {task.page}"
    tasks = [line.split("|")[1] for line in index.partition(row)[0].splitlines() if line.startswith("|")]
    page = (ROOT / "docs" / task.page).read_text()
    headings = re.findall(r"^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", page), re.M)
    assert task.heading in headings, f"{task.asks}: {task.page} has no heading {task.heading!r}"
    section = re.split(
        r"^#", re.split(rf"^#+ {re.escape(task.heading)}$", page, maxsplit=1, flags=re.M)[1], maxsplit=1, flags=re.M
    )[0]
    assert task.answer in section, f"{task.asks}: section {task.heading!r} lacks {task.answer!r}"
    scanned = _words(" ".join([*tasks, row, *headings[: headings.index(task.heading) + 1]]))
    read = _words(section[: section.index(task.answer)]) + 25  # with the sentence of the answer
    return {
        "task": task.asks,
        "pages": 2,
        "way": f"{task.page}: {task.heading}",
        "seconds": scanned / SCANNED + read / READ,
    }


def run(json_output: bool, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Follow the way of each task."""
    results = {"tasks": [measured(task) for task in TASKS if task.asks in cases]}
    machine.record("docs", results, markdown)
    if not json_output:
        print(markdown(results))
    return results


def markdown(results: dict[str, Any]) -> str:
    """Return the text for benchmarks/results and the terminal."""
    rows = [
        "# Twenty tasks in the documentation",
        "",
        "`scripts/bench docs`. No search: the index (docs/README.md), one page, its headings, and the section down to "
        "the answer.",
        f"Seconds are words on this way: {SCANNED:.0f} a second in rows and headings, {READ:.0f} in text. No person "
        "was timed.",
        "",
        "| task | page: section | pages, with the index | seconds |",
        "| --- | --- | --- | --- |",
        *(f"| {t['task']} | {t['way']} | {t['pages']} | {t['seconds']:.0f} |" for t in results["tasks"]),
    ]
    return "\n".join(rows) + "\n"
