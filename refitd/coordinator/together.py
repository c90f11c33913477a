"""Swaps of several models that are decided together: all are journalled in one write, or none is."""

from __future__ import annotations

from collections.abc import Collection

from refitd.coordinator.decision import Phase
from refitd.coordinator.models import Models, ModelState, Running, Together
from refitd.coordinator.schedule import gives_way
from refitd.errors import RefusedError
from refitd.protocol import local
from refitd.protocol.reports import SwapReport, SwapReports

# Limit on models of one joint swap.
MAX_TOGETHER = 16


def named(models: Models, asked: local.StartSwaps) -> list[ModelState]:
    """Return the states of the models that are to be swapped together.

    Raises:
        RefusedError: a model is unknown, is named twice or is being swapped, or there are too few or too many.
    """
    names = [one.model for one in asked.swaps]
    if not 1 <= len(names) <= MAX_TOGETHER or len(set(names)) < len(names):
        raise RefusedError(f"models {names[:MAX_TOGETHER]}: name 1 to {MAX_TOGETHER} models, each once")
    states = [models.named(name) for name in names]
    for name, state in zip(names, states, strict=True):
        running = state.running
        if running is not None and not gives_way(running):
            s = running.swap
            raise RefusedError(
                f"model {name!r}: swap {s.swap} to version {s.version} is running (phase {s.phase.value}); wait for "
                "it, or abort it with `refitctl abort`"
            )
    return states


def check_shared(models: Models, names: Collection[str]) -> None:
    """Refuse to swap models without those whose engines use a tensor that the swap would write.

    Raises:
        RefusedError: names the tensor, the other model and the next step.
    """
    for other, state in models.items():
        if other in names:
            continue
        for member in state.membership.targets.values():
            for shared in member.added.shares:
                if shared.model in names:
                    raise RefusedError(
                        f"model {shared.model!r}: its replica {shared.replica!r} holds {shared.name} for model "
                        f"{other!r} too (replica {member.added.replica!r}), whose weights would change too; swap both: "
                        f"client.swap_together({{{shared.model!r}: None, {other!r}: None}}), or `refitctl swap "
                        f"{shared.model} --with {other}`; to go back, publish the older weights as new versions of both"
                    )


def party_of(models: Models, state: ModelState, running: Running) -> list[tuple[ModelState, Running]]:
    """Return the swaps that are decided together with a running one, itself included."""
    if running.together is None:
        return [(state, running)]
    states = [models[name] for name in running.together.models if name in models]
    return [(one, its) for one in states if (its := one.running) is not None and its.together is running.together]


def until_all_staged(running: Running, party: list[tuple[ModelState, Running]], now: float) -> float:
    """Return until when the decision waits for the other swaps of its party; 0 if it waits for none."""
    if running.together is None:
        return 0.0
    if len(party) == len(running.together.models) and all(its.swap.phase is Phase.STAGED for _, its in party):
        return 0.0
    limits = running.swap.limits
    return now + limits.plan_s + limits.stage_s + 2 * limits.pause_s


def also_aborted(models: Models, running: Running) -> list[tuple[ModelState, str]]:
    """Return the swaps that end because one of their party was aborted, and the reason."""
    party, s = running.together, running.swap
    if party is None or party.aborted:
        return []
    party.aborted = f"it was to be decided together with model {s.model!r}, whose swap was aborted: {s.reason}"
    found = [models[name] for name in party.models if name in models and name != s.model]
    return [(one, party.aborted) for one in found if one.running is not None and one.running.together is party]


def reported(party: Together, report: SwapReport) -> SwapReports | None:
    """Note a swap's report; return all of them once, when the last one comes."""
    is_new = report.model not in party.reports
    party.reports[report.model] = report
    if not is_new or len(party.reports) < len(party.models):
        return None
    return SwapReports(tuple(party.reports[name] for name in party.models))
