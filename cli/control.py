"""refitctl: the operator's program."""

from __future__ import annotations

import click

from refitd_cli.group import Commands
from refitd_cli.session import Session

COMMANDS = {
    "swap": "refitd_cli.commands.swap:swap",
    "rollback": "refitd_cli.commands.swap:rollback",
    "publish": "refitd_cli.commands.checkpoints:publish",
    "save": "refitd_cli.commands.checkpoints:save",
    "verify": "refitd_cli.commands.swap:verify",
    "history": "refitd_cli.commands.history:history",
    "status": "refitd_cli.commands.status:status",
    "wait": "refitd_cli.commands.wait:wait",
    "watch": "refitd_cli.commands.status:watch",
    "dashboard": "refitd_cli.commands.dashboard:dashboard",
    "models": "refitd_cli.commands.status:models",
    "trace": "refitd_cli.commands.history:trace",
    "plan": "refitd_cli.commands.plan:plan",
    "explain": "refitd_cli.commands.explain:explain",
    "simulate": "refitd_cli.commands.simulate:simulate",
    "manifest": "refitd_cli.commands.manifest:manifest",
    "abort": "refitd_cli.commands.swap:abort",
    "evict": "refitd_cli.commands.drain:evict",
    "forget": "refitd_cli.commands.drain:forget",
    "drain": "refitd_cli.commands.drain:drain",
    "resume": "refitd_cli.commands.drain:resume",
    "keygen": "refitd_cli.commands.config:keygen",
    "reload": "refitd_cli.commands.config:reload",
    "config": "refitd_cli.commands.config:config",
    "doctor": "refitd_cli.commands.doctor:doctor",
    "docs": "refitd_cli.commands.docs:docs",
    "support-bundle": "refitd_cli.commands.support_bundle:support_bundle",
    "demo": "refitd_cli.commands.demo:demo",
}


OF_REFITD = {name: f"refitd {name}" for name in ("serve", "coordinator")}


@click.group(cls=Commands, lazy=COMMANDS, elsewhere=OF_REFITD, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="refitd")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Look at and steer the weights a refitd cluster serves."""
    if ctx.obj is None:
        ctx.obj = Session()


if __name__ == "__main__":
    main(prog_name="refitctl")
