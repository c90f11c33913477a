"""refitctl verify: check what every replica serves against the digest of its version."""

from __future__ import annotations

import click

from refitd.protocol.reports import Difference, MemberProof, VerifyReport
from refitd.states import ProofState
from refitd_cli.group import EXIT_FAILED
from refitd_cli.output import duration, print_table, say, size, version
from refitd_cli.session import Duration, Session, asks, model_names


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
    session.show(report, _show)
    return 0 if report.outcome == ProofState.PROVEN else EXIT_FAILED


def _show(report: VerifyReport) -> None:
    columns = ("replica", ">rank", "node", "state", ">serves", ">bytes", "digest", "reason")
    print_table("", columns, map(_row, report.members))
    for member in report.members:
        for difference in member.differences:
            say(f"  {_told(member, difference)}", err=True)
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


def _told(member: MemberProof, difference: Difference) -> str:
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


def _row(member: MemberProof) -> tuple[str, ...]:
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
