"""Names of models that a test shares with no other: daemons that tests pass on remember the versions of each model."""

from __future__ import annotations

import os

SUFFIX = "TESTED_MODEL"  # environment variable, so that the processes of a test use the same names


def named(model: str) -> str:
    """Return the name of this model in the running test."""
    return model + os.environ.get(SUFFIX, "")


def policy() -> str:
    """Return the name of "policy" in the running test."""
    return named("policy")
