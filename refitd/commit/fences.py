"""Rules for ranks that return, or that serve another version than the live one."""

from __future__ import annotations

import enum


class Verdict(enum.Enum):
    """The outcome for the staged version of a rank that returns."""

    COMMIT = "commit"
    ABORT = "abort"
    WAIT = "wait"  # it is not known yet whether the swap is decided


def verdict(*, is_decided: bool, may_be_decided: bool) -> Verdict:
    """Return what a returning rank does with its staged version.

    Args:
        is_decided: the journal or a daemon knows the swap as decided.
        may_be_decided: the journal has not answered about the decision, or daemons that know more may still return.
    """
    if may_be_decided:
        return Verdict.WAIT
    return Verdict.COMMIT if is_decided else Verdict.ABORT


def fence_reason(version: int | None, run: str, live: int | None, live_run: str) -> str:
    """Return why a rank must not serve `version` of `run`; "" if it may, or if it holds none.

    `live` of `live_run` is the version decided last, None before the first decision.
    """
    if version is None or live is None or (version, run) == (live, live_run):
        return ""
    if version == live:
        return f"it holds version {live} of run {run or '?'}, and that of run {live_run} is live"
    return f"it holds version {version}, and {live} is live"
