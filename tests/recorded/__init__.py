"""Files of this version, recorded for later trees, which must read them (tests/unit/test_recorded.py).

    python -m tests.recorded     writes the files, messages and names that are missing; it replaces none

Journals and files of people are read for ever, so a change of their format adds files beside these. Messages are read
within a major version of the protocol: another one begins a new file, and its predecessor is deleted. A name that is
removed from names.txt needs a line in CHANGELOG.md.
"""

from __future__ import annotations

import random
import re
import sqlite3
from pathlib import Path
from typing import get_args

import msgspec

import refitd
from refitd.coordinator.journals import SCHEMA, SCHEMA_VERSION, Drain, KnownNode, LiveVersion, Recovered, SwapRecord
from refitd.coordinator.journals.file import FileJournal
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.reports import LostNode, ReplicaName, SwapReport
from refitd.states import SwapOutcome
from refitd_cli import control, daemon
from tests.fuzz.values import value_of

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
MESSAGES = HERE / f"protocol-{PROTOCOL_VERSION // 1000}.jsonl"
JOURNAL = HERE / f"journal-{SCHEMA_VERSION}.{SCHEMA.count('CREATE TABLE')}.sql"  # with its number of tables
CONFIGURATION = HERE / "configuration.toml"
NAMES = HERE / "names.txt"
COPIED = {  # from configs/
    CONFIGURATION: "laptop.toml",
    HERE / "cluster.toml": "clusters/ethernet-10g.toml",
    HERE / "layout.toml": "layouts/llama-3-70b-serve-tp4.toml",
    HERE / "model.toml": "layouts/models/llama-3-70b-vllm.toml",
}

REPORT = msgspec.json.encode(SwapReport("s2", "policy", 7, SwapOutcome.DECIDED))
RECORDS = (
    SwapRecord("s1", "policy", 6, "committed", "d1", "", 1.0, run="r"),
    SwapRecord(
        "s2", "policy", 7, "decided", "d1", "", 2.0, msgspec.json.encode(SwapReport("s2", "policy", 7, "decided")), "r"
    ),
    SwapRecord("s3", "policy", 8, "aborted", "d1", "a worker died", 3.0, run="r"),
)
DRAIN = Drain("n1", frozenset({("policy", "a")}))
RECOVERED = Recovered("draft", LiveVersion(3, "r", 4, "s9"), "the lost journal", 6.0, 3)
NODE = KnownNode("n2", LostNode("n2", "box", 7, 9.0, "no heartbeat", (ReplicaName("policy", "b"),), ("policy",)), 5.0)


def kinds() -> list[type[msgspec.Struct]]:
    """Return the types of all messages."""
    unions = (
        cluster.NodeMessage,
        cluster.CoordinatorMessage,
        local.ClientRequest,
        local.ClientReply,
        sidecar.ToWorker,
        sidecar.FromWorker,
        sidecar.DescriptorReply,
        local.Hello,
    )
    found = {kind for union in unions for kind in get_args(union) or (union,)}
    return sorted(found, key=lambda kind: kind.__name__)


def messages() -> str:
    """Return one message of each type, all its fields set, as JSON; bytes are in base64."""
    lines = []
    for kind in kinds():
        about, rng = msgspec.inspect.type_info(kind), random.Random(kind.__name__)
        found = max((value_of(about, rng) for _ in range(20)), key=lambda value: (len(value), -len(repr(value))))
        lines.append(msgspec.json.encode(msgspec.convert(found, kind)).decode())
    return "".join(f"{line}\n" for line in lines)


def journal(place: Path) -> str:
    """Return a journal with rows in every table, as SQL."""
    written = FileJournal(place)
    for record in RECORDS:
        written.write(record)
    written.set_drain(DRAIN, 4.0)
    written.note(NODE, RECOVERED)
    written.close()
    written.abandon()
    with sqlite3.connect(place) as db:
        lines = [line for line in db.iterdump() if "sqlite_" not in line]
    return "\n".join([*lines, f"PRAGMA user_version={SCHEMA_VERSION};"]) + "\n"


def names() -> str:
    """Return the public names: of Python, of commands and of metrics."""
    metrics = re.findall(r"^\| `(refitd_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    found = [f"refitd.{name}" for name in refitd.__all__]
    found += [f"refitctl {name}" for name in control.COMMANDS] + [f"refitd {name}" for name in daemon.COMMANDS]
    return "".join(f"{name}\n" for name in sorted({*found, *metrics}))
