"""refitctl rollback: make an earlier version live again, in every replica or in none."""

from __future__ import annotations

from collections.abc import Callable

import click

from refitd.protocol.reports import SwapProgress, SwapReport
from refitd_cli.commands.swap import perform
from refitd_cli.completion import model_names
from refitd_cli.numbers import Number
from refitd_cli.session import ControlClient, address_option, json_option


@click.command()
@click.argument("model", shell_complete=model_names)
@click.option("--version", "number", type=click.IntRange(min=0), help="[default: the one before the live one]")
@click.option("--timeout", type=Number(min=0, min_open=True), metavar="S", help="Seconds for all of it.")
@address_option
@json_option
@click.pass_context
def rollback(
    ctx: click.Context, model: str, number: int | None, timeout: float | None, address: str | None, as_json: bool
) -> None:
    """Return MODEL to a version that was live before, in every replica or in none.

    Every source rank must hold it still: it is staged and verified like any other (`refitctl history` lists them).
    """

    def ask(client: ControlClient, on_progress: Callable[[SwapProgress], None] | None) -> SwapReport:
        return client.rollback(model, number, timeout=timeout, on_progress=on_progress)

    perform(ctx, model, address, as_json, ask)
