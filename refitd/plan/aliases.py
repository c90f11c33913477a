"""Choose the source tensor for a destination tensor that sources hold only under another name.

A tensor and its `aliases` are one weight, whichever end declares it:

    source: embedding, aliases (output,)     destination: embedding and output     both from embedding
    source: embedding                        destination: output, aliases (embedding,)         likewise
    source: embedding and output             each from its own; a destination that ties them is refused, unless a
                                             source also declares them tied

Aliases are used only for tensors that no source has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from refitd.describe.layout import canonical_name
from refitd.describe.metadata import ParameterMetadata

Ties = Mapping[tuple[str, ...], str]  # (tensor, *aliases) -> the first to declare it


def alias_problem(meta: ParameterMetadata) -> str:
    """Return what is wrong with a tensor's aliases, or ""."""
    name = tied_name(meta)
    if not isinstance(meta.aliases, tuple) or not all(isinstance(alias, str) and alias for alias in meta.aliases):
        return f"{meta.name}: aliases are {meta.aliases!r}, expected a tuple of canonical names"
    if len({tile.tensor for tile in meta.tiles or ()}) > 1:
        return (
            f"{meta.name}: it has aliases {meta.aliases} and holds several canonical tensors; register the tied one "
            "on its own"
        )
    if name in meta.aliases:
        return f"{name}: it is declared an alias of itself; its aliases are the other names of the same weight"
    return ""


def tied_name(meta: ParameterMetadata) -> str:
    """Return the canonical name to which a tensor's aliases belong."""
    return meta.tiles[0].tensor if meta.tiles else canonical_name(meta)


def resolve_aliases(ties: Ties, held: set[str], wanted: Iterable[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return {wanted tensor that no source holds: tied tensor that feeds it}, and problems by the tensor's name.

    If sources hold several tied tensors, the first by name is taken: they are declared equal.
    """
    found: dict[str, str] = {}
    problems: dict[str, list[str]] = {}
    groups = _groups(ties)
    for group in {id(group): group for group in groups.values()}.values():
        said = [names for names in ties if names[0] in group]
        if not any(set(names) == group for names in said):
            problems[said[0][0]] = [_chained(said, ties)]
    for name in sorted(set(wanted) - held):
        group = groups.get(name, set())
        known = sorted(group & held)
        if known:
            found[name] = known[0]
        elif group:
            others = ", ".join(sorted(group - {name}))
            who = next(who for names, who in ties.items() if name in names)
            problems.setdefault(name, []).append(
                f"{name}: no source has it, nor {others}, which {who} declares to be the same weight; check the names, "
                "or which source ranks have registered"
            )
    return found, problems


def untied_sources(ties: Ties, by_sources: Iterable[tuple[str, ...]], held: set[str]) -> dict[str, list[str]]:
    """Return problems, by tensor, of weights that destinations tie but sources hold separately and do not tie.

    Args:
        ties: all declarations.
        by_sources: the declarations made by sources.
        held: the tensors that sources hold.
    """
    problems: dict[str, list[str]] = {}
    same = _groups(dict.fromkeys(by_sources, ""))
    for names, who in ties.items():
        apart = sorted(held.intersection(names))
        if len(apart) > 1 and not same.get(apart[0], set()).issuperset(apart):
            problems.setdefault(apart[0], [
                f"{apart[0]}: {who} holds it and {', '.join(apart[1:])} as one weight (tied), and the sources hold "
                "weights of their own under these names, whose values may differ; tie both ends or neither: declare "
                "the aliases at the source, or register an untied model"
            ])  # fmt: skip
    return problems


def _groups(ties: Ties) -> dict[str, set[str]]:
    """Return, for each name, all names tied to it, directly or indirectly, and itself."""
    groups: dict[str, set[str]] = {}
    for names in ties:
        merged = set(names).union(*(groups.get(name, set()) for name in names))
        for name in merged:
            groups[name] = merged
    return groups


def _chained(said: list[tuple[str, ...]], ties: Ties) -> str:
    links = "; ".join(f"{ties[names]} ties {names[0]} to {', '.join(names[1:])}" for names in said)
    every = sorted(set().union(*said))
    return (
        f"{said[0][0]}: its aliases form a chain or a cycle ({links}); expected one declaration with all of "
        f"{', '.join(every)}; declare all others as aliases of one of them"
    )
