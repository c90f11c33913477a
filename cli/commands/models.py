"""refitctl models: one line per model."""

from __future__ import annotations

from collections import Counter

import click

from refitd.protocol.reports import ModelStatus
from refitd_cli.output import print_json, print_table, say, size, to_json, version, versions
from refitd_cli.session import Session, address_option, json_option

NAMED = 4  # replicas of a model in its line; of more, `refitctl watch` has one each


@click.command()
@address_option
@json_option
@click.pass_obj
def models(session: Session, address: str | None, as_json: bool) -> None:
    """List the models: published versions, and the version of every replica."""
    with session.client(address) as client:
        found = client.status().models
    if as_json:
        print_json({"models": [to_json(model) for model in found]})
    elif not found:
        say("no models: no trainer and no engine has registered yet")
    else:
        columns = ("model", "complete versions", "source ranks", "source bytes", "serving", "auto swap")
        print_table("", columns, (_row(model) for model in found))


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
