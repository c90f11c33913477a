"""The output of the demo: progress while it runs, tables at the end, one JSON object for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refitd.text import printable
from refitd_cli.demo.data import PROMPT
from refitd_cli.demo.proof import LOGITS_TOLERANCE, Verdict
from refitd_cli.output import duration, rate, size, takes_escapes
from refitd_cli.printed import DemoRan, MXFP8Saved

PIPED_WIDTH = 160


@dataclass
class ShownChange:
    """One engine's change to a new version."""

    way: str  # "flip": it exchanges its arenas; "copy": it copies into its tensors
    paused_s: float  # its slowest rank
    token: int  # the token before which all its ranks flipped
    places_unchanged: bool
    before: str  # text of the old version
    after: str = ""  # the same prompt, completed by the new one


@dataclass
class SwapRow:
    """One swap's row in the tables."""

    version: int
    by: str
    step: int
    loss: float
    publish_s: float
    bytes: int
    stage_s: float
    commit_s: float
    total_s: float
    digests: int
    flips: dict[str, ShownChange] = field(default_factory=dict)

    @property
    def places_unchanged(self) -> bool:
        """Whether every tensor of every engine kept its address, storage and strides."""
        return all(flip.places_unchanged for flip in self.flips.values())


class Progress:
    """Lines on stderr, each with the seconds since the start."""

    def __init__(self) -> None:
        self._begun = self._last = time.monotonic()
        self._awaited = ""

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._begun

    def say(self, text: str) -> None:
        """Print a line."""
        self._last = time.monotonic()
        print(f"[{self.seconds:5.1f} s] {printable(text)}", file=sys.stderr, flush=True)

    def waiting(self, what: str) -> None:
        """Print the awaited event once, after a while without output."""
        if what != self._awaited and time.monotonic() - self._last > 1.5:
            self._awaited = what
            self.say(f"... waiting for {what}")


def sample(text: str) -> str:
    """Return generated text on one line; what no source of Python has (random bytes decode to any script) is a dot."""
    named = " ".join(text.split())
    return "".join(char if char.isascii() and char.isprintable() else "\N{MIDDLE DOT}" for char in named)


def tables(
    rows: Sequence[SwapRow],
    verdicts: Sequence[Verdict],
    layouts: Mapping[str, str],
    arriving: Mapping[str, int],
    *,
    to_stderr: bool,
) -> None:
    """Print the swaps, the engines' samples, and whether the engines hold the trainer's weights."""
    on_terminal = (sys.stderr if to_stderr else sys.stdout).isatty()
    plain = None if takes_escapes(sys.stderr if to_stderr else sys.stdout) else False
    width = None if on_terminal else PIPED_WIDTH
    console = Console(stderr=to_stderr, width=width, highlight=False, force_terminal=plain)
    shown = [_swaps(rows), _samples(rows), _proof(verdicts, layouts)]
    if any(verdict.is_mxfp8 for verdict in verdicts):
        shown.append(_saved(verdicts, arriving))
    for table in shown:
        console.print(table)
    for verdict in verdicts:
        for line in verdict.differing:
            console.print(Text(line, style="red"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def _swaps(rows: Sequence[SwapRow]) -> Table:
    ways = {replica: flip.way for replica, flip in rows[0].flips.items()} if rows else {}
    table = _table(
        "Swaps",
        ">version",
        "by",
        ">step",
        ">loss",
        ">published in",
        ">bytes",
        ">staged in",
        ">GB/s",
        ">total",
        *(f">{replica} paused ({way})" for replica, way in ways.items()),
        ">digests",
        "pointers",
    )
    for row in rows:
        table.add_row(
            str(row.version),
            row.by,
            str(row.step),
            f"{row.loss:.3f}",
            duration(row.publish_s),
            size(row.bytes),
            duration(row.stage_s),
            rate(row.bytes, row.stage_s).removesuffix(" GB/s"),
            duration(row.total_s),
            *(duration(row.flips[replica].paused_s) for replica in ways),
            f"{row.digests} equal",
            _mark(row.places_unchanged, "unchanged", "MOVED"),
        )
    return table


def _samples(rows: Sequence[SwapRow]) -> Table:
    table = _table(f"Engines complete {sample(PROMPT.decode())!r}", ">version", "engine", "before", "after")
    for row in rows:
        for replica, flip in row.flips.items():
            table.add_row(str(row.version), replica, Text(sample(flip.before)), Text(sample(flip.after)))
    return table


def _proof(verdicts: Sequence[Verdict], layouts: Mapping[str, str]) -> Table:
    trainer = layouts["trainer"]
    table = _table(
        f"Engines against the trainer ({trainer})",
        "engine",
        "layout",
        ">tensors",
        ">bytes compared",
        "weights",
        ">logits max |diff|",
        ">tolerance",
        ">argmax agrees",
    )
    for verdict in verdicts:
        table.add_row(
            verdict.replica,
            layouts[verdict.replica],
            str(verdict.tensors),
            size(verdict.bytes),
            _mark(not verdict.differing, _equal_to(verdict), "DIFFERENT"),
            f"{verdict.logits_max_abs_diff:.1e}",
            "-" if verdict.is_mxfp8 else f"{LOGITS_TOLERANCE:.0e}",
            f"{verdict.argmax_agreement:.1%}",
        )
    return table


def _equal_to(verdict: Verdict) -> str:
    return "the whole, converted once" if verdict.is_mxfp8 else "bit for bit"


def _saved(verdicts: Sequence[Verdict], arriving: Mapping[str, int]) -> Table:
    """Return what MXFP8 saves. The copies that a processor without MXFP8 multiplies with are not counted."""
    table = _table(
        "Bytes of each engine",
        "engine",
        "projections",
        ">in bfloat16",
        ">arrive per swap",
        ">saved",
        ">held",
        ">saved",
        ">logits max |diff|",
    )
    for verdict in verdicts:
        plain = verdict.bfloat16_bytes or verdict.bytes
        table.add_row(
            verdict.replica,
            "MXFP8" if verdict.is_mxfp8 else "bfloat16",
            size(plain),
            size(arriving[verdict.replica]),
            f"{1 - arriving[verdict.replica] / plain:.0%}",
            size(verdict.bytes),
            f"{1 - verdict.bytes / plain:.0%}",
            f"{verdict.logits_max_abs_diff:.1e}",
        )
    return table


def _mark(good: bool, yes: str, no: str) -> Text:
    return Text(yes, style="green") if good else Text(no, style="bold red")


def pauses(rows: Sequence[SwapRow]) -> str:
    """Return one line with the median pause of each engine and how it takes versions over."""
    medians = {name: median(row.flips[name].paused_s for row in rows) for name in rows[0].flips}
    said = (f"{name} {duration(medians[name])} ({flip.way})" for name, flip in rows[0].flips.items())
    return f"engines paused, median: {', '.join(said)}"


def as_object(
    rows: Sequence[SwapRow],
    verdicts: Sequence[Verdict],
    layouts: Mapping[str, str],
    arriving: Mapping[str, int],
    seconds: float,
) -> DemoRan:
    """Return the result for programs."""
    exact = [verdict for verdict in verdicts if not verdict.is_mxfp8]
    mxfp8 = {
        verdict.replica: MXFP8Saved(
            bfloat16_bytes=verdict.bfloat16_bytes,
            arriving_bytes=arriving[verdict.replica],
            held_bytes=verdict.bytes,
            equal_to_whole_converted_once=not verdict.differing,
            logits_max_abs_diff=verdict.logits_max_abs_diff,
            argmax_agreement=verdict.argmax_agreement,
        )
        for verdict in verdicts
        if verdict.is_mxfp8
    }
    return DemoRan(
        swaps=len(rows),
        versions=tuple(row.version for row in rows),
        bytes_per_swap=int(median(row.bytes for row in rows)),
        seconds_per_swap=median(row.total_s for row in rows),
        stage_seconds=tuple(row.stage_s for row in rows),
        total_seconds=tuple(row.total_s for row in rows),
        publish_seconds=tuple(row.publish_s for row in rows),
        paused_seconds={name: tuple(row.flips[name].paused_s for row in rows) for name in rows[0].flips},
        commit_ways={replica: flip.way for replica, flip in rows[0].flips.items()},
        digests_verified=sum(row.digests for row in rows),
        losses=tuple(row.loss for row in rows),
        replicas=len(verdicts),
        layouts=dict(layouts),
        weights_equal=not any(verdict.differing for verdict in verdicts),
        tensors_compared=sum(verdict.tensors for verdict in verdicts),
        bytes_compared=sum(verdict.bytes for verdict in verdicts),
        logits_max_abs_diff=max(verdict.logits_max_abs_diff for verdict in exact),
        logits_tolerance=LOGITS_TOLERANCE,
        argmax_agreement=min(verdict.argmax_agreement for verdict in exact),
        data_ptrs_unchanged=all(row.places_unchanged for row in rows),
        seconds=seconds,
        mxfp8=mxfp8,
    )
