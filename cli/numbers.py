"""Numbers that options take."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A number within limits. click's own range takes nan, because nan is neither below nor above any limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; fail if it is none, or out of range."""
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found
