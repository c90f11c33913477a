"""refitctl status: nodes, models, who has what, and what is going on."""

from __future__ import annotations

import click

from refitd.protocol.reports import ModelStatus, StatusReport
from refitd_cli.output import duration, print_json, print_table, rate, size, to_json, version, versions
from refitd_cli.session import Session, address_option, json_option


@click.command()
@address_option
@json_option
@click.pass_obj
def status(session: Session, address: str | None, as_json: bool) -> None:
    """Show the cluster as the coordinator sees it."""
    with session.client(address) as client:
        report = client.status()
    if as_json:
        print_json(to_json(report))
    else:
        _show(report)


def _show(report: StatusReport) -> None:
    click.echo(f"coordinator: pid {report.coordinator_pid}, up {duration(report.uptime_s)}")
    columns = ("node", "host", ">pid", ">workers", ">clients", ">arenas", ">arena bytes")
    rows = (
        (
            node.node,
            node.host,
            str(node.pid),
            str(len(node.workers)),
            str(node.clients),
            str(node.arenas),
            size(node.arena_bytes),
        )
        for node in report.nodes
    )
    print_table("nodes", columns, rows)
    if not report.models:
        click.echo("no models: no trainer and no engine has registered yet")
    for model in report.models:
        _show_model(model)


def _show_model(model: ModelStatus) -> None:
    click.echo(f"model {model.model}: complete versions {versions(model.complete_versions)}{_activity(model)}")
    sources = (
        (
            str(source.rank),
            f"{source.node}/{source.host}",
            str(source.pid) if source.attached else "gone",
            str(source.tensors),
            size(source.bytes),
            versions(source.versions),
            source.way or "-",
        )
        for source in model.sources
    )
    print_table("sources", (">rank", "node/host", ">pid", ">tensors", ">bytes", "versions held", "given"), sources)
    targets = (
        (
            target.replica,
            f"{target.rank}/{target.world_size}",
            f"{target.node}/{target.host}",
            str(target.pid),
            str(target.tensors),
            size(target.bytes),
            target.state,
            version(target.version),
            version(target.staged),
        )
        for target in model.targets
    )
    columns = ("replica", ">rank", "node/host", ">pid", ">tensors", ">bytes", "state", ">serves", ">staged")
    print_table("targets", columns, targets)


def _activity(model: ModelStatus) -> str:
    text = "; swaps when a version is complete" if model.auto_swap else ""
    if running := model.swap:
        text += (
            f"; swapping to {running.version}: {running.phase}, "
            f"{size(running.bytes_done)} of {size(running.bytes_total)}"
        )
    if last := model.last_swap:
        text += f"; last swap: version {version(last.version)} {last.outcome}"
        if last.outcome == "committed":
            text += f" in {duration(last.total_s)}, staged at {rate(last.bytes, last.stage_s)}"
        else:
            text += f" in phase {last.phase}: {last.reason}"
    return text
