"""Layouts learned from random loaders match the loaders, or are refused; those of engines' shards are learned."""

from __future__ import annotations

import threading
import warnings

import pytest

from tests.loaders.generate import generate
from tests.loaders.judge import judge

SEEDS = range(1_000_000, 1_000_200)


@pytest.mark.parametrize("seeds", [SEEDS[i::4] for i in range(4)], ids=range(4))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_layout_of_a_random_loader_is_accepted_and_wrong(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # refused in a thread of the loader's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdicts = [judge(generate(seed)) for seed in seeds]
    assert not [one for one in verdicts if one.outcome == "wrong"], "scripts/loaders --only SEED shows a loader"
    assert not [one for one in verdicts if one.is_benign and one.outcome != "learned"]
    assert {"computed", "refused"} <= {one.outcome for one in verdicts}
