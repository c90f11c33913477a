"""refitctl swap, rollback, abort, verify: make a version live everywhere, stop that, and prove what is served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from refitd.errors import RefitFailed
from refitd.protocol.reports import (
    Crossing,
    Difference,
    MemberProof,
    MemberReport,
    SwapFailed,
    SwapProgress,
    SwapReport,
    VerifyReport,
)
from refitd.states import MemberState, ProofState, SwapOutcome
from refitd_cli.group import EXIT_FAILED, error_object
from refitd_cli.output import (
    counted,
    duration,
    print_json,
    print_table,
    rate,
    say,
    share,
    size,
    swap_bar,
    to_json,
    version,
)
from refitd_cli.printed import SwapAborted
from refitd_cli.session import Duration, Session, asks, model_names

if TYPE_CHECKING:
    from refitd.client import Client

EXIT_INTERRUPTED = 130
BLAMED = {MemberState.LOST, MemberState.FAILED, MemberState.LATE, MemberState.POISONED}


@click.command()
@click.argument("model", shell_complete=model_names)
@click.option("--version", "number", type=click.IntRange(min=0), help="Which one.  [default: the newest complete one]")
@click.option("--timeout", type=Duration(min=0, min_open=True), metavar="S", help="Seconds for all of it.")
@click.option(
    "--with",
    "others",
    multiple=True,
    metavar="MODEL[:VERSION]",
    shell_complete=model_names,
    help="Decide this model together with it.",
)
@click.option("--queue", is_flag=True, help="Wait for a swap of the model that is running, instead of being refused.")
@click.option(
    "--wait",
    "wait_s",
    type=Duration(min=0),
    default=0.0,
    metavar="S",
    help="Seconds to wait for missing ranks and for the version.",
)
@asks
def swap(
    session: Session,
    model: str,
    number: int | None,
    timeout: float | None,
    others: tuple[str, ...],
    queue: bool,
    wait_s: float,
) -> int:
    """Bring a published version of MODEL into every replica: all of them or none.

    Exit 0 only if every rank of every replica serves the version that is printed.
    """
    if others:
        if queue:
            raise click.UsageError("--queue and --with exclude each other")
        return _perform_together(session, {model: number} | dict(map(_parsed, others)), timeout, wait_s)

    def ask(client: Client, on_progress: Callable[[SwapProgress], None] | None) -> SwapReport:
        return client.swap(model, number, timeout=timeout, queue=queue, wait=wait_s, on_progress=on_progress)

    return perform(session, model, ask)


def perform(
    session: Session,
    model: str,
    ask: Callable[[Client, Callable[[SwapProgress], None] | None], SwapReport],
    told: Mapping[str, Any] | None = None,
) -> int:
    """Run a swap, show its progress and outcome, return the exit status; `told` joins the report's fields in JSON."""
    error: SwapFailed | None = None
    with session.client() as client, swap_bar(model) as on_progress:
        try:
            report = ask(client, on_progress)
        except SwapFailed as exc:
            report, error = exc.report, exc
        except KeyboardInterrupt:
            say(f"no longer watching; see refitctl status, or stop the swap: refitctl abort {model}", err=True)
            return EXIT_INTERRUPTED
    if session.as_json:
        print_json(_as_object(report, error) | dict(told or {}))
    else:
        _show(report)
    return 0 if report.outcome == SwapOutcome.COMMITTED and error is None else EXIT_FAILED


def _parsed(text: str) -> tuple[str, int | None]:
    name, colon, number = text.rpartition(":")
    if not colon:
        return text, None
    if not name or not number.isdecimal():
        raise click.BadParameter(f"{text!r} is not MODEL or MODEL:VERSION", param_hint="--with")
    return name, int(number)


def _perform_together(
    session: Session,
    versions: dict[str, int | None],
    timeout: float | None,
    wait_s: float,
) -> int:
    """Swap several models by one decision, show the outcome of each, and return the exit status."""
    error: SwapFailed | None = None
    reports: list[SwapReport] = []
    with session.client() as client, swap_bar(", ".join(versions)) as on_progress:
        try:
            reports = [*client.swap_together(versions, timeout=timeout, wait=wait_s, on_progress=on_progress).values()]
        except SwapFailed as exc:
            reports, error = [*exc.together], exc
    if session.as_json:
        failed = {} if error is None else error_object(error)
        print_json({"models": [to_json(report) for report in reports]} | failed)
    else:
        for report in reports:
            _show(report)
    return 0 if error is None else EXIT_FAILED


def culprits(report: SwapReport) -> list[str]:
    """Return the ranks that kept the swap from committing, one line each: rank, host, phase and reason."""
    blamed = [member for member in report.members if member.state in BLAMED]
    blamed = blamed or [member for member in report.members if member.reason]
    phase = report.phase or "swap"
    if not blamed:
        return [f"{phase}: {report.reason or 'no reason was given; the coordinator log has it'}"]
    return [
        f"rank {member.rank} of replica {member.replica} on node {member.node} "
        f"(host {member.host}, pid {member.pid}), "
        f"phase {phase}: {member.state}: {member.reason or report.reason}"
        for member in blamed
    ]


def ways(report: SwapReport) -> str:
    """Return how many source ranks used each transfer mode."""
    return ", ".join(f"{count} {mode or 'unknown'}" for mode, count in Counter(s.mode for s in report.sources).items())


def _as_object(report: SwapReport, error: SwapFailed | None) -> dict[str, Any]:
    found = to_json(report)
    if report.outcome != SwapOutcome.COMMITTED or error is not None:
        found |= error_object(error or RefitFailed("\n".join(culprits(report))))
    return found


def _show(report: SwapReport) -> None:
    for one in report.refused:
        say(str(one), err=True)
    if report.members:
        columns = ("replica", ">rank", "node", "state", ">serves", ">paused", "reason")
        print_table("", columns, (_row(member) for member in report.members))
    if report.outcome == SwapOutcome.COMMITTED:
        say(
            f"{report.model}: version {version(report.version)} is live on "
            f"{counted(len(report.members), 'rank')}: "
            f"{size(report.bytes)} in {report.copies} copies, {_verified(report)}; "
            f"plan {duration(report.plan_s)}, stage {duration(report.stage_s)} "
            f"({rate(report.bytes, report.stage_s)}), commit {duration(report.commit_s)}, "
            f"total {duration(report.total_s)}"
        )
        if report.crossing.bytes:
            say(f"between nodes: {_crossed(report.crossing)}")
        if report.kept_tensors:
            say(f"kept as they were, not sent: {report.kept_tensors} tensors, {size(report.kept_bytes)}")
        if report.sources:
            say(f"sources: {ways(report)}")
        if report.suspended:
            say(f"left out, because their engines are suspended: {', '.join(report.suspended)}")
        if report.drained:
            say(f"left out, because their nodes are drained: {', '.join(report.drained)}")
        return
    if report.outcome == SwapOutcome.DECIDED:
        told = "is decided and goes on; the time is over, and not every rank has it: see refitctl status"
    else:
        told = f"did not go live: {report.outcome}"
    say(f"{report.model}: version {version(report.version)} {told}", err=True)
    for line in culprits(report):
        say(f"  {line}", err=True)


def _crossed(crossing: Crossing) -> str:
    sent = f"{size(crossing.crossed_bytes)} for {size(crossing.bytes)}"
    if crossing.changed is None:
        return f"{sent}, sent whole"
    return f"{sent}; {share(crossing.changed)} of {size(crossing.delta_bytes)} had changed since the version before"


def _verified(report: SwapReport) -> str:
    if report.copies and not report.digests:
        return "not verified (verify is false for this model)"
    return f"{report.digests} digests verified"


def _row(member: MemberReport) -> tuple[str, ...]:
    return (
        member.replica,
        str(member.rank),
        member.node,
        member.state,
        version(member.version),
        duration(member.paused_s) if member.paused_s else "-",
        member.reason,
    )


@click.command()
@click.argument("model", shell_complete=model_names)
@click.option("--version", "number", type=click.IntRange(min=0), help="[default: the one before the live one]")
@click.option("--timeout", type=Duration(min=0, min_open=True), metavar="S", help="Seconds for all of it.")
@asks
def rollback(session: Session, model: str, number: int | None, timeout: float | None) -> int:
    """Return MODEL to a version that was live before, in every replica or in none.

    Engines whose memory flips return to the previous version without a source. All sources must still hold any other
    version: it is staged and verified like a new one (`refitctl history` lists them).
    """

    def ask(client: Client, on_progress: Callable[[SwapProgress], None] | None) -> SwapReport:
        return client.rollback(model, number, timeout=timeout, on_progress=on_progress)

    return perform(session, model, ask)


@click.command()
@click.argument("model", shell_complete=model_names)
@click.option(
    "--reason",
    default="aborted by the operator",
    show_default=True,
    help="Shown to clients that wait for the swap.",
)
@asks
def abort(session: Session, model: str, reason: str) -> None:
    """Stop the running swap of MODEL; the version that serves now keeps serving.

    A swap whose commit is decided cannot be stopped; the command then says so.
    """
    with session.client() as client:
        client.abort(model, reason)
    aborted = SwapAborted(model, aborted=True, reason=reason)
    session.show(aborted, lambda _: say(f"{model}: swap aborted ({reason})"))


@click.command()
@click.argument("model", shell_complete=model_names)
@click.option("--timeout", type=Duration(min=0, min_open=True), metavar="S", help="Seconds for all of it.")
@asks
def verify(session: Session, model: str, timeout: float | None) -> int:
    """Check the live weights of every replica of MODEL against the digest of the version that it serves.

    Engines continue to serve. Exit 0 only if every rank that serves a version is proven to hold it, byte for byte.
    """
    with session.client() as client:
        report = client.verify(model, timeout=timeout)
    session.show(report, _show_proofs)
    return 0 if report.outcome == ProofState.PROVEN else EXIT_FAILED


def _show_proofs(report: VerifyReport) -> None:
    columns = ("replica", ">rank", "node", "state", ">serves", ">bytes", "digest", "reason")
    print_table("", columns, map(_proof_row, report.members))
    for member in report.members:
        for difference in member.differences:
            say(f"  {_difference(member, difference)}", err=True)
        if (more := member.blocks - len(member.differences)) > 0:
            say(f"  and {more} more blocks of rank {member.rank} of replica {member.replica}", err=True)
    for mixed in report.mixed:
        say(f"  {mixed}", err=True)
    serving = [member for member in report.members if member.version is not None]
    proven = [member for member in serving if member.state == ProofState.PROVEN]
    nbytes = sum(member.bytes for member in proven)
    say(
        f"{report.model}: {report.outcome}: {len(proven)} of {len(serving)} ranks that serve a version hold it, "
        f"{size(nbytes)} compared in {duration(report.seconds)}",
        err=report.outcome != ProofState.PROVEN,
    )


def _difference(member: MemberProof, difference: Difference) -> str:
    shape = "x".join(map(str, difference.shape)) or "scalar"
    what = (
        f"{difference.differing} elements differ, from element {difference.first} to {difference.last}"
        if difference.differing
        else f"somewhere in elements {difference.first} to {difference.last}"
    )
    return (
        f"{difference.parameter}{difference.slice} (of {shape}) on rank {member.rank} of replica {member.replica} on "
        f"node {member.node} (host {member.host}, pid {member.pid}): {what}"
    )


def _proof_row(member: MemberProof) -> tuple[str, ...]:
    return (
        member.replica,
        str(member.rank),
        member.node,
        member.state,
        version(member.version),
        size(member.bytes) if member.bytes else "-",
        member.digest[:16] or "-",
        member.reason,
    )
