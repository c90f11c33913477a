"""A simulated swap as a trace for Perfetto (the Chrome trace event format)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from refitd.simulate.predict import Prediction


def trace(predictions: Iterable[Prediction]) -> dict[str, Any]:
    """Return the JSON object: one process for each prediction, with its phases and its busiest cables as threads."""
    events: list[dict[str, Any]] = []
    for number, prediction in enumerate(predictions, 1):
        events.append(_named("process_name", number, 0, prediction.route.value))
        events.append(_named("thread_name", number, 0, "phases"))
        at, arriving = 0.0, 0.0
        for phase in prediction.phases:
            if phase.name == "arriving":
                arriving = at
            events.append(_slice(number, 0, phase.name, at, phase.seconds, {}))
            at += phase.seconds
        for thread, (cable, rates) in enumerate(zip(prediction.cables, prediction.rates, strict=True), 1):
            events.append(_named("thread_name", number, thread, cable.name))
            for rate in rates:
                name = f"{rate.gb_s:.4g} GB/s"
                given = {"GB/s": rate.gb_s, "of": cable.gb_s}
                events.append(_slice(number, thread, name, arriving + rate.begin_s, rate.end_s - rate.begin_s, given))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(process: int, thread: int, name: str, at_s: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": at_s * 1e6,
        "dur": seconds * 1e6,
        "args": args,
    }
