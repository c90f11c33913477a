"""Options and plans of commands that read manifests and need no daemon."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from refitd.describe.roster import Roster
from refitd.offline import Manifest, ModelSpec, load, load_model, rosters_of
from refitd.plan.shared import GlobalPlan

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Planned:
    """A plan between two manifests. `rosters` are in rank order."""

    source: Manifest
    targets: tuple[Manifest, ...]
    rosters: list[Roster]
    plan: GlobalPlan
    plan_s: float


def manifest_options(function: F) -> F:
    """Add --source, --target, --model and --collocated."""
    for option in (
        click.option("--collocated", is_flag=True, help="Targets that set no first_rank start at rank 0, too."),
        click.option("--model", "model_file", metavar="FILE", help="Model of the layouts, over those they name."),
        click.option("--target", "targets", multiple=True, metavar="FILE", help="Who receives; may be given again."),
        click.option("--source", metavar="FILE", help="Who sends: a layout or shards manifest, TOML or JSON."),
    ):
        function = option(function)
    return function


def read_manifests(
    source: str, targets: Sequence[str], model_file: str | None
) -> tuple[Manifest, tuple[Manifest, ...]]:
    """Read both sides; raises ConfigError with what is wrong with a file."""
    model: ModelSpec | None = load_model(Path(model_file)) if model_file is not None else None
    return load(source, model), tuple(load(target, model) for target in targets)


def planned(source: str, targets: Sequence[str], model_file: str | None, collocated: bool) -> Planned:
    """Plan a refit between manifests.

    Raises:
        ConfigError: a manifest cannot be used.
        PlanError: the plan is refused.
    """
    from refitd.plan.build import plan_copies

    sender, receivers = read_manifests(source, targets, model_file)
    with _spinner("describing and planning"):
        rosters = rosters_of(sender, receivers, collocated=collocated)
        started = time.perf_counter()
        plan = plan_copies(rosters)
        return Planned(sender, receivers, rosters, plan, time.perf_counter() - started)


def rank_ranges(ranks: Sequence[int], limit: int = 4) -> str:
    """Return ascending ranks for people: "0-7, 16, 24-31"; from `limit` runs on, how many more there are."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:limit]]
    more = sum(high - low + 1 for low, high in runs[limit:])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _spinner(text: str) -> AbstractContextManager[Any]:
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)
