"""`refitctl doctor --links`: measures what each node's cable sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from refitd.errors import RefusedError
from refitd.offline.measured import cluster_of, rounds_of, speeds_of, to_toml
from refitd.protocol.cable_reports import CableRate, CableReport, CableSpeed
from refitd_cli.output import print_table, size
from refitd_cli.session import ControlClient

# The number of pairs that are listed by default.
SHOWN_PAIRS = 30


def measured(
    client: ControlClient, duration: float, on_round: Callable[[int, int, Sequence[CableRate]], None]
) -> CableReport:
    """Measure all cables, round by round; `on_round` gets (rounds done, rounds, what the last one found).

    Raises:
        RefusedError: there is only one node, or swaps run.
        TransportError: nodes cannot reach each other.
    """
    nodes = [node.node for node in client.status().nodes]
    if len(nodes) < 2:
        raise RefusedError(f"only {', '.join(nodes) or 'no node'} is connected; cables are between nodes")
    rounds = rounds_of(nodes)
    rates: list[CableRate] = []
    service, lanes = "", 0
    for number, pairs in enumerate(rounds, 1):
        found = client.measure_cables(pairs, duration=duration)
        service, lanes = found.service, found.lanes
        rates += found.rates
        on_round(number, len(rounds), found.rates)
    send, receive = speeds_of((rate.source, rate.target, rate.speed) for rate in rates)
    speeds = tuple(CableSpeed(node, round(send.get(node, 0)), round(receive.get(node, 0))) for node in sorted(nodes))
    return CableReport(service, lanes, speeds, tuple(rates))


def file_of(report: CableReport) -> str:
    """Return the cluster file; "" if nothing was measured."""
    send = {one.node: float(one.send) for one in report.nodes if one.send}
    receive = {one.node: float(one.receive) for one in report.nodes if one.receive}
    if not send:
        return ""
    note = f"measured by refitctl doctor --links, over {report.service}, {report.lanes} lanes"
    return to_toml(cluster_of("measured", note, send, receive))


def show(report: CableReport) -> None:
    """Print the tables: what each node's cable does, and what the pairs did."""
    print_table(
        f"cables, over {report.service}",
        ("node", ">sends /s", ">receives /s"),
        ((one.node, _speed(one.send), _speed(one.receive)) for one in report.nodes),
    )
    slowest = sorted(report.rates, key=lambda rate: rate.speed)[:SHOWN_PAIRS]
    more = "" if len(slowest) == len(report.rates) else f" (the slowest {len(slowest)} of {len(report.rates)})"
    print_table(
        f"pairs{more}",
        ("from", "to", ">per second", "problem"),
        ((rate.source, rate.target, _speed(rate.speed), rate.reason) for rate in slowest),
    )


def _speed(speed: int) -> str:
    return f"{size(speed)} ({8 * speed / 1e9:.3g} Gbit/s)" if speed else "not measured"
