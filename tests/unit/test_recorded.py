"""This tree reads what earlier ones wrote: a journal, one message of each type, a configuration, and public names."""

from __future__ import annotations

import sqlite3
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refitd import config
from refitd.clusters import load_cluster
from refitd.coordinator.journals.file import FileJournal
from refitd.offline.files import load, load_model
from tests import recorded

JOURNALS = sorted(recorded.HERE.glob("journal-*.sql"))


def covers(found: Any, earlier: Any) -> bool:
    """Whether everything of an earlier value is in a later one, which may have more fields."""
    if isinstance(earlier, dict) and isinstance(found, dict):
        return all(key in found and covers(found[key], value) for key, value in earlier.items())
    if isinstance(earlier, list) and isinstance(found, list):
        return len(found) >= len(earlier) and all(map(covers, found, earlier))
    return bool(found == earlier)


def test_every_recorded_message_of_this_major_protocol_is_read_with_all_its_fields() -> None:
    assert recorded.MESSAGES.exists(), "another major protocol: python -m tests.recorded, delete the old file"
    kinds = {kind.__name__: kind for kind in recorded.kinds()}
    earlier = [msgspec.json.decode(line) for line in recorded.MESSAGES.read_text().splitlines()]
    assert {message["type"] for message in earlier} == {*kinds}, "a new message: python -m tests.recorded"
    for message in earlier:
        found = msgspec.convert(message, kinds[message["type"]], builtin_types=())
        assert covers(msgspec.json.decode(msgspec.json.encode(found)), message), message["type"]


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_a_recorded_journal_is_read(path: Path, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "journal") as db:
        db.executescript(path.read_text())
    journal = FileJournal(tmp_path / "journal")
    try:
        live = journal.live("policy")
        assert live is not None and (live.version, live.run, live.swap) == (7, "r", "s2")
        assert [(one.swap, one.state, one.reason) for one in journal.recent("policy", 9)] == [
            (one.swap, one.state, one.reason) for one in reversed(recorded.RECORDS)
        ]
        decided = journal.decided("s2")
        assert decided is not None and decided.written_report() is not None
        assert journal.drained() == {"n1": frozenset({("policy", "a")})}
        if path.stem != "journal-3":  # which is older than the table of nodes
            assert journal.nodes() == [recorded.NODE]
            assert journal.live("draft") == recorded.RECOVERED.live and journal.continues("the lost journal")
    finally:
        journal.close()
        journal.abandon()


def test_the_present_journal_is_recorded() -> None:
    assert recorded.JOURNAL in JOURNALS, "another schema, or a new table: python -m tests.recorded"


def test_a_recorded_configuration_is_read_with_all_its_values() -> None:
    found = msgspec.to_builtins(config.load(str(recorded.CONFIGURATION), environ={}))
    earlier = tomllib.loads(recorded.CONFIGURATION.read_text())
    earlier.pop("models", None)
    assert covers(msgspec.json.decode(msgspec.json.encode(found)), earlier)


def test_recorded_manifests_and_clusters_are_read() -> None:
    speeds, model = load_cluster(recorded.HERE / "cluster.toml"), load_model(recorded.HERE / "model.toml")
    layout = load(recorded.HERE / "layout.toml", model)
    assert (speeds.nic_gb_s, model.layers, layout.tp, layout.dp) == (1.125, 80, 4, 8)


def test_the_present_names_are_recorded_and_recorded_ones_exist() -> None:
    present, earlier = ({*text.splitlines()} for text in (recorded.names(), recorded.NAMES.read_text()))
    assert present <= earlier, "new names: python -m tests.recorded"
    assert earlier <= present, (
        "name the replacement in CHANGELOG.md, then remove these names from tests/recorded/names.txt"
    )
