"""refitd: the program that runs the processes of a node."""

from __future__ import annotations

import os

# refitd does not use BLAS. Without this, numpy starts a thread for each processor in every process of the node.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import click

from refitd_cli import control
from refitd_cli.group import Commands

COMMANDS = {
    "serve": "refitd_cli.commands.serve:serve",
    "coordinator": "refitd_cli.commands.serve:coordinator",
}

OF_REFITCTL = {name: f"refitctl {name}" for name in control.COMMANDS}


@click.group(
    cls=Commands,
    lazy=COMMANDS,
    elsewhere=OF_REFITCTL,
    prints=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="refitd")
def main() -> None:
    """Keep a node's weights, and bring new ones into its engines."""


if __name__ == "__main__":
    main(prog_name="refitd")
