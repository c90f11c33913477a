"""The dashboard's charts: time, bytes and longest pause of each model's last swaps, as bars of inline SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from refitd.protocol.reports import HistoryEntry, SwapReport
from refitd.states import SwapOutcome
from refitd_cli import html
from refitd_cli.output import duration, size, version

WIDTH, HEIGHT, BAR, GAP = 600, 48, 10, 2  # units of the drawing: room for 50 swaps


def charts(swaps: Sequence[HistoryEntry]) -> Iterator[str]:
    """Yield three charts of a model's swaps, given the newest first and drawn the oldest first."""
    ended = [one for one in reversed(swaps) if one.report is not None][-WIDTH // (BAR + GAP) :]
    if len(ended) < 2:
        return
    yield '<div class="charts">'
    for title, value, unit in (
        ("time", _time, duration),
        ("bytes", _bytes, lambda found: size(int(found))),
        ("longest pause", _pause, duration),
    ):
        values = [value(one.report) for one in ended if one.report is not None]
        top = max(values) or 1.0
        bars = "".join(
            _bar(number, found / top, one, unit(found))
            for number, (one, found) in enumerate(zip(ended, values, strict=True))
        )
        yield (
            f"<figure><figcaption>{title}, up to {html.text(unit(max(values)))}</figcaption>"
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="xMinYMax meet" role="img">{bars}</svg></figure>'
        )
    yield "</div>"


def _bar(number: int, share: float, entry: HistoryEntry, value: str) -> str:
    height = max(1.0, share * HEIGHT)
    tone = "" if entry.state == SwapOutcome.COMMITTED else "failed"
    about = f"version {version(entry.version)}, {entry.state}: {value}"
    return (
        f'<rect class="{tone}" x="{number * (BAR + GAP)}" y="{HEIGHT - height:.1f}" width="{BAR}" '
        f'height="{height:.1f}"><title>{html.text(about)}</title></rect>'
    )


def _time(report: SwapReport) -> float:
    return report.total_s


def _bytes(report: SwapReport) -> float:
    return report.bytes


def _pause(report: SwapReport) -> float:
    return max((member.paused_s for member in report.members), default=0.0)
