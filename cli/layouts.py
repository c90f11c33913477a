"""Options and plans of commands that read manifests and need no daemon."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from refitd.clusters import ClusterSpeeds, cables_of
from refitd.describe.metadata import Roster
from refitd.offline.files import load, load_model
from refitd.offline.layouts import Manifest, ModelSpec, Shards, world_size
from refitd.offline.rosters import place, rosters_of
from refitd.plan.cost import EQUAL
from refitd.plan.shared import GlobalPlan
from refitd_cli.output import rank_ranges, takes_escapes

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class RankNumbers:
    """The ranks of one manifest: in the plan, and by their own numbers."""

    name: str
    first: int  # its rank 0 in the plan
    ranks: tuple[int, ...]  # in the plan

    def own(self, ranks: Iterable[int]) -> str:
        """Return its own ranks among `ranks`, by their own numbers ("0-7 of serve"); "" if none is."""
        mine = set(self.ranks).intersection(ranks)
        return f"{rank_ranges(sorted(rank - self.first for rank in mine))} of {self.name}" if mine else ""


@dataclass(frozen=True)
class ManifestPlan:
    """A plan between two manifests. `rosters` are in rank order; the first of `sides` is the source."""

    sides: tuple[RankNumbers, ...]
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
        click.option("--target", "targets", multiple=True, metavar="FILE", help="The receiver; may be given again."),
        click.option("--source", metavar="FILE", help="The sender: a layout or shards manifest, TOML or JSON."),
    ):
        function = option(function)
    return function


def read_manifests(
    source: str, targets: Sequence[str], model_file: str | None
) -> tuple[Manifest, tuple[Manifest, ...]]:
    """Read both sides; raises ConfigError with the error in a file."""
    model: ModelSpec | None = load_model(Path(model_file)) if model_file is not None else None
    return load(source, model), tuple(load(target, model) for target in targets)


def planned(
    source: str,
    targets: Sequence[str],
    model_file: str | None,
    collocated: bool,
    cluster: ClusterSpeeds | None = None,
) -> ManifestPlan:
    """Plan a refit between manifests, for cables as a cluster has them; None: equally fast ones.

    Raises:
        ConfigError: a manifest cannot be used.
        PlanError: the plan is refused.
    """
    from refitd.plan.build import plan_copies

    sender, receivers = read_manifests(source, targets, model_file)
    with _spinner("describing and planning"):
        rosters = rosters_of(sender, receivers, collocated=collocated)
        started = time.perf_counter()
        cables = EQUAL if cluster is None or not cluster.nodes else cables_of(cluster, (r.node for r in rosters))
        plan = plan_copies(rosters, cables=cables)
        sides = _sides((sender, *receivers), collocated)
        return ManifestPlan(sides, sender, receivers, rosters, plan, time.perf_counter() - started)


def _sides(manifests: Sequence[Manifest], collocated: bool) -> tuple[RankNumbers, ...]:
    found = []
    for placed in place(manifests, collocated=collocated):
        manifest = placed.manifest
        own = [r.rank for r in manifest.ranks] if isinstance(manifest, Shards) else range(world_size(manifest))
        found.append(RankNumbers(manifest.name, placed.first_rank, tuple(placed.first_rank + rank for rank in own)))
    return tuple(found)


def _spinner(text: str) -> AbstractContextManager[Any]:
    if not takes_escapes(sys.stderr):
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)
