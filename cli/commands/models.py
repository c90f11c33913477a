"""refitctl models: one line per model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click

from refitd.protocol.reports import ModelStatus
from refitd_cli.output import print_table, say, size, version, versions
from refitd_cli.session import Session, asks

NAMED = 4  # replicas of a model in its line; of more, `refitctl watch` has one each


@click.command()
@asks
def models(session: Session) -> None:
    """List the models: published versions, and the version of every replica."""
    with session.client() as client:
        found = client.status().models
    session.show({"models": found}, lambda _: _show(found))


def _show(found: Sequence[ModelStatus]) -> None:
    if found:
        columns = ("model", "complete versions", "source ranks", "source bytes", "serving", "auto swap")
        print_table("", columns, map(_row, found))
    else:
        say("no models: no trainer and no engine has registered yet")


def _row(model: ModelStatus) -> tuple[str, ...]:
    attached = sum(source.attached for source in model.sources)
    return (
        model.model,
        versions(model.complete_versions),
        f"{attached}/{model.source_world_size}",
        size(sum(source.bytes for source in model.sources)),
        served(model),
        "yes" if model.auto_swap else "no",
    )


def served(model: ModelStatus) -> str:
    """Return what each replica serves: "a: 7, b: 6" or, where ranks of one differ, "a: 6+7"; or how many serve what."""
    replicas: dict[str, set[str]] = {}
    for target in model.targets:
        replicas.setdefault(target.replica, set()).add(version(target.version))
    found = {name: "+".join(sorted(those)) for name, those in sorted(replicas.items())}
    if len(found) > NAMED:
        counts = sorted(Counter(found.values()).items())
        return ", ".join(f"{served} in {count} of them" for served, count in counts)
    return ", ".join(f"{name}: {served}" for name, served in found.items()) or "-"
