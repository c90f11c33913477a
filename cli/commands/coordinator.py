"""refitd coordinator: run the process that plans and decides."""

from __future__ import annotations

import click

from refitd_cli import settings


@click.command()
@settings.config_options
@click.pass_context
def coordinator(ctx: click.Context, path: str | None, runtime_dir: str | None, log_level: str | None) -> None:
    """Run the coordinator until SIGTERM or SIGINT. It logs to stderr."""
    config = settings.load(path, node__runtime_dir=runtime_dir, log__level=log_level)
    from refitd.coordinator import run

    ctx.exit(run(config))
