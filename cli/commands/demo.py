"""refitctl demo: train, refit and check, with real processes."""

from __future__ import annotations

from importlib.util import find_spec

import click

from refitd_cli.session import Session, prints


@click.command()
@click.option("--mxfp8", is_flag=True, help="One engine holds its projections in MXFP8, beside one in bfloat16.")
@prints
def demo(session: Session, mxfp8: bool) -> int:
    """Train a small sharded model and refit two running engines with it.

    Starts a separate daemon in a temporary directory and stops it afterwards. Exit 0 only if every weight
    of every engine equals the trainer's at the end.
    """
    if find_spec("torch") is None:  # importing it takes seconds, and its trainer and engines do that
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    from refitd_cli.demo.run import main

    return main(session.as_json, mxfp8=mxfp8)
