"""refitctl wait: block until a node is ready, or a model has its replicas or a version."""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from refitd.errors import DeadlineExceeded, TransportError
from refitd.protocol.reports import ModelStatus, StatusReport
from refitd_cli.output import counted, say, version
from refitd_cli.session import Connection, Duration, Session, asks, model_names

if TYPE_CHECKING:
    pass

PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Goal:
    """What is waited for: "ready", "version" or "replicas", the latter two with a number."""

    kind: str
    number: int = 0


class GoalParam(click.ParamType):  # type: ignore[type-arg]  # not generic in click 8.2
    """ready, version=N or replicas=N."""

    name = "goal"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Goal:
        """Return the goal; fail if it is none."""
        if value == "ready" or isinstance(value, Goal):
            return Goal("ready") if value == "ready" else value
        found = re.fullmatch(r"(version|replicas)=([0-9]{1,18})", value)
        if found is None:
            self.fail(f"{value!r} is none of ready, version=N, replicas=N.", param, ctx)
        return Goal(found[1], int(found[2]))


@click.command()
@click.argument("model", required=False, shell_complete=model_names)
@click.option(
    "--for",
    "goal",
    type=GoalParam(),
    default="ready",
    metavar="GOAL",
    help="ready: the node has its coordinator; of MODEL, all ranks and a version to swap are there.  version=N: every "
    "replica serves version N or a newer one.  replicas=N: N replicas have all their ranks.  [default: ready]",
)
@click.option("--timeout", type=Duration(min=0), default=60.0, show_default=True, metavar="S", help="Seconds to wait.")
@asks
def wait(session: Session, model: str | None, goal: Goal, timeout: float) -> None:
    """Wait until this node, or MODEL, is ready, serves a version or has its replicas.

    Also waits for a daemon that is still starting. Exit 1 if the time is over; the message tells what is missing.
    """
    if model is None and goal.kind != "ready":
        raise click.UsageError(f"--for {goal.kind}= needs a MODEL")
    deadline = time.monotonic() + timeout
    report = _reached(session, model, goal, deadline, timeout)
    reached = f"ready: {counted(len(report.nodes), 'node')}" if model is None else f"{model}: {_words(goal)}"
    session.show(report, lambda _: say(reached))


def _reached(session: Session, model: str | None, goal: Goal, deadline: float, timeout: float) -> StatusReport:
    with closing(Connection(session)) as connection:
        while True:
            try:
                with connection.client() as client:
                    report = client.status(timeout=max(1.0, deadline - time.monotonic()))
                if not (lacks := missing(report, model, goal)):
                    return report
            except TransportError as exc:
                lacks = str(exc)
            if time.monotonic() >= deadline:
                subject = f"model {model!r}" if model else "this node"
                advice = f"; see `refitctl status{f' {model}' if model else ''}`, or raise --timeout"
                raise DeadlineExceeded(f"{subject}: not reached within {timeout:g} s: {lacks}{advice}")
            time.sleep(PAUSE_S)


def missing(report: StatusReport, model: str | None, goal: Goal) -> str:
    """Return what a goal lacks, "" if it is reached."""
    if model is None:
        return "" if report.nodes else "no node is connected to the coordinator"
    found = next((each for each in report.models if each.model == model), None)
    if found is None:
        return f"no trainer and no engine has registered model {model!r}"
    ranks = Counter(target.replica for target in found.targets)
    worlds = {target.replica: target.world_size for target in found.targets}
    partial = [
        f"replica {name!r} has {ranks[name]} of {size} ranks" for name, size in worlds.items() if ranks[name] < size
    ]
    if goal.kind == "replicas":
        complete = len(worlds) - len(partial)
        return (
            "" if complete >= goal.number else ", ".join([f"{complete} of {goal.number} replicas are there", *partial])
        )
    if goal.kind == "version":
        late = {target.replica: target.version for target in found.targets if (target.version or -1) < goal.number}
        behind = [f"replica {name!r} serves {version(number)}" for name, number in late.items()]
        return ", ".join(behind) if worlds else "no replica is registered"
    return ", ".join(partial or _lacks(found, bool(worlds)))


def _lacks(model: ModelStatus, has_replicas: bool) -> list[str]:
    found = [] if has_replicas else ["no replica is registered"]
    return found if model.complete_versions else [*found, "no version is complete at the sources"]


def _words(goal: Goal) -> str:
    if goal.kind == "version":
        return f"every replica serves version {goal.number} or a newer one"
    return f"{counted(goal.number, 'replica')} or more" if goal.kind == "replicas" else "ready to swap"
