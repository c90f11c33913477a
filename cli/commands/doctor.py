"""refitctl doctor: check this machine for what keeps refitd from working."""

from __future__ import annotations

import click
import msgspec

from refitd_cli import checks
from refitd_cli.group import EXIT_FAILED
from refitd_cli.output import print_json, print_table, to_json
from refitd_cli.session import Session, address_option, json_option


class DoctorFound(msgspec.Struct, frozen=True):
    """What keeps refitd from working on this machine; `healthy` where no check fails."""

    healthy: bool
    checks: tuple[checks.CheckResult, ...]


@click.command()
@address_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, address: str | None, as_json: bool) -> None:
    """Check this machine and the daemon on it. Exit 1 if something keeps refitd from working."""
    session: Session = ctx.obj
    findings = tuple(checks.all_findings(lambda: session.factory(address), address))
    healthy = all(finding.state != "fail" for finding in findings)
    if as_json:
        print_json(to_json(DoctorFound(healthy, findings)))
    else:
        rows = ((finding.name, finding.state, finding.found, finding.advice) for finding in findings)
        print_table("", ("check", "state", "found", "what to do"), rows)
    ctx.exit(0 if healthy else EXIT_FAILED)
