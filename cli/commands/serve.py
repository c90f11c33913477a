"""refitd serve and coordinator: run this node's daemon, or the process that plans and decides."""

from __future__ import annotations

import click

from refitd_cli.session import config_options, load_config


@click.command()
@config_options
@click.option("--workers", type=int, help="Over node.workers: how many sidecars copy.")
@click.option("--standalone", is_flag=True, help="Run the coordinator beside the daemon.")
@click.option(
    "--ready-fd",
    type=int,
    metavar="N",
    help='Write "ready" and a newline to descriptor N once clients can connect.',
)
def serve(
    path: str | None,
    runtime_dir: str | None,
    log_level: str | None,
    workers: int | None,
    standalone: bool,
    ready_fd: int | None,
) -> int:
    """Run this node's daemon until SIGTERM or SIGINT. It logs to stderr."""
    config = load_config(path, node__runtime_dir=runtime_dir, node__workers=workers, log__level=log_level)
    from refitd import daemon

    return daemon.run(config, standalone=standalone, ready_fd=ready_fd)


@click.command()
@config_options
def coordinator(path: str | None, runtime_dir: str | None, log_level: str | None) -> int:
    """Run the coordinator until SIGTERM or SIGINT. It logs to stderr."""
    config = load_config(path, node__runtime_dir=runtime_dir, log__level=log_level)
    from refitd.coordinator import run

    return run(config)
