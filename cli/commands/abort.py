"""refitctl abort: stop a running swap."""

from __future__ import annotations

import click

from refitd_cli.completion import model_names
from refitd_cli.output import print_json, say, to_json
from refitd_cli.printed import SwapAborted
from refitd_cli.session import Session, address_option, json_option


@click.command()
@click.argument("model", shell_complete=model_names)
@click.option(
    "--reason",
    default="aborted by the operator",
    show_default=True,
    help="Shown to whoever waits for the swap.",
)
@address_option
@json_option
@click.pass_obj
def abort(session: Session, model: str, reason: str, address: str | None, as_json: bool) -> None:
    """Stop the running swap of MODEL; the version that serves now keeps serving.

    A swap whose commit is decided cannot be stopped any more, and says so.
    """
    with session.client(address) as client:
        client.abort(model, reason)
    if as_json:
        print_json(to_json(SwapAborted(model, aborted=True, reason=reason)))
    else:
        say(f"{model}: swap aborted ({reason})")
