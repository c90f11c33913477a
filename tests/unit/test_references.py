"""Reference pages, runbook, diagrams and examples match the code."""

from __future__ import annotations

import importlib.util
import json
import logging
import pkgutil
import re
import sys
from itertools import takewhile
from pathlib import Path

import click
import pytest
import yaml

from benchmarks import docs
from refitd import errors, logs
from refitd.errors import RefusedError
from refitd_cli import control
from refitd_cli.demo.proof import Verdict
from refitd_cli.demo.show import ShownChange, SwapRow, as_object
from refitd_cli.output import to_json
from tests.support import cli
from tests.support.json_schema import check_printed, fits, schema
from tests.support.programs import run
from tests.support.references import REPORTS, commands
from tests.support.site import ROOT, build
from tests.support.states import DOCUMENT, drawn


def test_references_are_what_the_code_says() -> None:
    # a separate process, because click caches the help option of a command's first use
    found = run([sys.executable, "-m", "tests.support.references", "--check"])
    assert found.returncode == 0, found.stderr


def test_every_command_that_prints_json_has_a_schema() -> None:
    prints = set()
    for context in commands(control.main, click.Context(control.main, info_name="refitctl")):
        if any("--json" in option.opts for option in context.command.params):
            prints.add(" ".join(context.command_path.split()[1:]))
    named = {" ".join(takewhile(lambda word: word[0] not in "-" and not word.isupper(), c.split())) for c in REPORTS}
    assert named == prints


@pytest.mark.parametrize("words", ["status", "history", "models", "watch --count 1", "swap m", "rollback m", "plan m"])
def test_what_commands_print_fits_the_schema(words: str) -> None:
    assert cli.run(cli.FakeClient(), *words.split(), "--json").object  # which compares
    assert cli.run(RefusedError("no"), *words.split(), "--json").object["error"]


def test_what_the_demo_prints_fits_the_schema() -> None:
    change = ShownChange("flip", 0.001, 7, places_unchanged=True, before="a")
    row = SwapRow(1, "client.swap", 5, 3.2, 0.1, 100, 0.2, 0.1, 0.4, 9, {"a": change, "b": change})
    verdicts = [Verdict("a", 3, 100, (), 0.0, 1.0), Verdict("b", 3, 60, (), 0.5, 0.9, bfloat16_bytes=100)]
    for some in (verdicts, verdicts[:1]):
        found = to_json(as_object([row], some, {"a": "TP4", "b": "TP1"}, {"a": 100, "b": 60}, 9.0))
        check_printed(("demo",), json.dumps(found))
        assert ("mxfp8" in found) == (some is verdicts)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": "7"}, "status.version: string, not integer or null"),
        ({"more": 1}, "status: \\['more'\\]"),
        ({"state": "gone"}, "status.state"),
    ],
)
def test_what_does_not_fit_a_schema_is_found(changed: dict[str, object], said: str) -> None:
    status = json.loads(json.dumps(to_json(cli.TARGET)))
    fits(status, schema()["$defs"]["TargetStatus"], "status")
    with pytest.raises(AssertionError, match=said):
        fits(status | changed, schema()["$defs"]["TargetStatus"], "status")


def test_the_site_has_every_page_and_no_link_that_leads_nowhere(tmp_path: Path) -> None:
    pages = build(tmp_path)
    assert {*(ROOT / "docs").glob("*.md"), ROOT / "CHANGELOG.md"} <= {*pages}
    for page in tmp_path.rglob("*.html"):
        for target in re.findall(r'href="([^"]+)"', page.read_text()):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            found = (page.parent / name) if name else page
            assert found.is_file(), (page.name, target)
            assert not anchor or f'id="{anchor}"' in found.read_text(), (page.name, target)


# --- The runbook has every alarm and every family of errors. --------------------------------------------


TEXT = (Path(__file__).parents[2] / "docs/runbook.md").read_text()


def test_every_event_that_is_logged_as_a_warning_or_an_error_has_a_row_with_its_level():
    rows = {
        (event, level)
        for events, level in re.findall(r"^\| (`[^|]*) \| (warning|error) \|", TEXT, re.MULTILINE)
        for event in re.findall(r"`([\w-]+)`", events)
    }
    loud = {
        (event, logging.getLevelName(level).lower()) for event, level in logs._LEVELS.items() if level > logging.INFO
    }
    assert loud <= rows
    assert {event for event, _ in rows} <= {*logs._LEVELS, "swap", "session-closed", "failed"}


def test_every_family_of_errors_has_a_row():
    abstract = {errors.RefitdError, errors.IllegalTransition}
    for kind in {*errors._all_errors()} - abstract:
        if kind.__module__ == "refitd.errors":
            assert f"`{kind.code}` |" in TEXT, kind


# --- The examples that only configure a framework use existing names and known settings of refitd. ------


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_nemo_rls_example_names_the_transport_and_settings_that_it_knows() -> None:
    generation = yaml.safe_load((EXAMPLES / "nemo_rl_grpo.yaml").read_text())["policy"]["generation"]
    transport = pkgutil.resolve_name(generation["refit_transport"])
    (settings,) = generation["refit_cfg"].values()
    assert [*generation["refit_cfg"]] == [generation["refit_transport"]]
    transport(1 << 20, **settings)


def test_verls_example_names_the_adapter() -> None:
    text = (EXAMPLES / "verl_grpo.sh").read_text()
    (module,) = [line.partition("=")[2].split()[0] for line in text.splitlines() if "custom_backend_module" in line]
    assert importlib.util.find_spec(module) is not None


# --- The state machines as docs/design.md shows them. ---------------------------------------------------


def test_the_document_shows_the_tables_that_the_code_looks_up() -> None:
    text = DOCUMENT.read_text()
    assert text == drawn(text), "docs/design.md is not what the tables are; run scripts/states"


@pytest.mark.parametrize("task", docs.TASKS, ids=lambda task: task.asks)
def test_a_task_is_answered_on_one_page_within_a_minute(task: docs.Task) -> None:
    found = docs.measured(task)
    assert found["pages"] <= docs.PAGES and found["seconds"] < docs.LIMIT_S
