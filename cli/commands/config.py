"""refitctl config, keygen, reload: check and show a configuration, make keys, have lists of keys read again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from refitd.config import Config, EtcdPlace
from refitd.errors import ConfigError, RefitdError
from refitd.protocol import keys
from refitd.protocol.reports import ReloadReport
from refitd.security import coordinator_keys, daemon_keys, node_users
from refitd.service import check_runtime_dir
from refitd_cli.group import EXIT_USAGE, Listed
from refitd_cli.output import print_table, say
from refitd_cli.printed import Check, ConfigChecked, ConfigShown, KeyMade
from refitd_cli.session import Session, asks, config_options, prints, read_config

HIDDEN = "(not shown)"
_STAND_INS = ("node.name", "node.runtime_dir", "coordinator.endpoint", "coordinator.journal")  # "" has a meaning


@click.group(cls=Listed)
def config() -> None:
    """Check a configuration, or show what is in force and where each value comes from."""


@config.command()
@config_options
@click.option("--coordinator", "alone", is_flag=True, help="No daemon runs here: leave out what only a daemon needs.")
@prints
def check(session: Session, path: str | None, runtime_dir: str | None, log_level: str | None, alone: bool) -> int:
    """Say whether `refitd serve` and `refitd coordinator` would start with this configuration. Exit 2 if not.

    Reads the file, the environment and the keys, as the user that runs it: be the daemon's user. Starts nothing.
    """
    found, _ = read_config(path, node__runtime_dir=runtime_dir, log__level=log_level)
    results = tuple(_checks(found, alone))
    valid = all(result.state != "fail" for result in results)
    rows = [("values", "ok", path or "defaults and environment"), *map(msgspec.structs.astuple, results)]
    session.show(ConfigChecked(valid, results), lambda _: print_table("", ("check", "state", "found"), rows))
    return 0 if valid else EXIT_USAGE


@config.command()
@config_options
@prints
def show(session: Session, path: str | None, runtime_dir: str | None, log_level: str | None) -> None:
    """Print the configuration in force as TOML, each value with the file, variable or flag that has set it.

    Empty values are replaced by their defaults. Keys are not shown, only the names of their files.
    """
    found, origins = read_config(path, node__runtime_dir=runtime_dir, log__level=log_level)
    tables = in_force(found)
    for key in _STAND_INS:
        if not getattr(getattr(found, key.partition(".")[0]), key.partition(".")[2]):
            origins.pop(key, None)
    session.show(ConfigShown(tables, origins), lambda shown: say(*as_toml(tables, origins)))


def in_force(found: Config) -> dict[str, dict[str, Any]]:
    """Return every table with its values; "models" holds a table for each model."""
    tables: dict[str, dict[str, Any]] = msgspec.to_builtins(found)
    tables["node"] |= {"name": found.node_name, "runtime_dir": str(found.runtime_dir)}
    one, *more = found.coordinator_endpoints
    tables["coordinator"] |= {"endpoint": [one, *more] if more else one, "journal": str(found.journal_place)}
    for name, table in tables.items():
        for key, value in table.items():
            # the value may be a secret key instead of its file
            if (name, key) != ("security", "server_key") and isinstance(value, str):
                table[key] = HIDDEN if keys.is_key(value) and not keys.is_path(value) else value
    return tables


def as_toml(tables: dict[str, dict[str, Any]], origins: dict[str, str]) -> Iterator[str]:
    """Yield lines of TOML, each value with where it comes from as a comment."""
    flat = {name: table for name, table in tables.items() if name != "models"}
    flat |= {f"models.{json.dumps(name, ensure_ascii=False)}": table for name, table in tables["models"].items()}
    names = {f"models.{json.dumps(name, ensure_ascii=False)}": f"models.{name}" for name in tables["models"]}
    for i, (name, table) in enumerate(flat.items()):
        yield from ["", f"[{name}]"] if i else [f"[{name}]"]
        for key, value in table.items():
            origin = origins.get(f"{names.get(name, name)}.{key}", "default")
            yield f"{key} = {_toml(value)}  # {origin}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {_toml(inner)}" for key, inner in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return json.dumps(value, ensure_ascii=False)  # text, numbers, booleans and lists are the same in both


def _checks(found: Config, alone: bool) -> Iterator[Check]:
    """Yield what was checked; `alone`: for a coordinator without a daemon."""
    asked = [("directory", _directory), ("users", _users), ("coordinator", _endpoint)]
    if not alone:
        asked.append(("transport", _service))
    if found.metrics.address is not None:
        asked.append(("metrics", _metrics))
    if found.transport.cables:
        asked.append(("cables", _cables))
    if found.uses_keys and found.security.server_key and not alone:
        asked.append(("as a daemon", _daemon))
    if found.uses_keys and found.security.allowed:
        asked.append(("as a coordinator", _coordinator))
    if isinstance(found.journal_place, EtcdPlace):
        asked.append(("journal", _journal))
    for name, ask in asked:
        try:
            yield Check(name, "ok", ask(found))
        except RefitdError as exc:
            yield Check(name, "fail", str(exc))


def _directory(found: Config) -> str:
    path = found.runtime_dir
    if os.path.lexists(path):
        check_runtime_dir(path, opened=bool(found.node.allowed_uids))
        return str(path)
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"node.runtime_dir {path} does not exist, and this user cannot make it in {above}")
    return f"{path}, made at the start"


def _metrics(found: Config) -> str:
    from refitd.metrics import listening

    assert found.metrics.address is not None
    host, port = found.metrics.address
    listening(
        (host, 0), f"metrics.endpoint {found.metrics.endpoint}"
    ).close()  # any port: a daemon that runs may have this one
    return f"{host}, port {port or 'any'}"


def _cables(found: Config) -> str:
    from refitd.coordinator.nodes import read_cluster

    cluster = read_cluster(found)
    assert cluster is not None
    return f"{cluster.name}, with {len(cluster.nodes)} nodes of their own speed"


def _users(found: Config) -> str:
    users = node_users(found)
    return "; ".join(f"uid {uid}: {', '.join(sorted(users.roles_of(uid)))}" for uid in sorted(users.uids))


def _service(found: Config) -> str:
    from refitd.copy_services.registry import installed

    if installed().find(found.transport.service).join is None:
        raise ConfigError(f"transport.service {found.transport.service!r} does not cross nodes; use gloo, nixl or nccl")
    return found.transport.service


def _endpoint(found: Config) -> str:
    if not found.uses_keys:
        return f"{found.coordinator_endpoint}, without keys"
    if not found.security.server_key and not found.security.allowed:
        raise ConfigError(
            f"coordinator.endpoint {found.coordinator_endpoint} needs security.server_key on a daemon, and "
            "security.allowed on the coordinator; neither is set (`refitctl docs configs/cluster/node-a.toml`)"
        )
    return f"{found.coordinator_endpoint}, with keys"


def _journal(found: Config) -> str:
    from refitd.coordinator.journals.etcd import check_place
    from refitd.coordinator.journals.gateway import Gateway
    from refitd.coordinator.main import cluster_of

    place = found.journal_place
    assert isinstance(place, EtcdPlace)
    gateway = Gateway(place, found.etcd)
    try:
        check_place(gateway, place, cluster_of(coordinator_keys(found)))
    finally:
        gateway.close()
    return f"{place} answers"


def _daemon(found: Config) -> str:
    from refitd.daemon.coordinator import reachable_address

    pair = daemon_keys(found)
    return f"key of {pair.own.name}; other nodes reach it at {reachable_address(found)}" if pair else ""


def _coordinator(found: Config) -> str:
    pair = coordinator_keys(found)
    return f"key of {pair.own.name}; admits {', '.join(a.name for a in pair.allowed.values())}" if pair else ""


@click.command()
@click.argument("name")
@click.option("-o", "--directory", default=".", metavar="DIR", help="Where the files go; may be new.  [default: here]")
@click.option("--replace", is_flag=True, help="Write over a key of this name; the old one is lost.")
@prints
def keygen(session: Session, name: str, directory: str, replace: bool) -> None:
    """Make NAME.key, which stays with its process, and NAME.pub, which others get.

    Daemons and a coordinator that meet over tcp need keys, on one host too. NAME is best the node's.
    """
    pair = keys.generate(name)
    key_file, public_file = keys.write(pair, Path(directory).resolve(), replace=replace)
    made = KeyMade(pair.name, pair.public, str(key_file), str(public_file))
    session.show(made, lambda _: say(*_advice(pair, key_file, public_file)))


def _advice(pair: keys.KeyPair, key_file: Path, public_file: Path) -> Iterator[str]:
    yield f"{key_file}: the secret; only its process may read it (mode 0600)"
    yield f"{public_file}: {pair.public_line}"
    yield ""
    yield "If it is a daemon's key, in that daemon's configuration:"
    yield "    [security]"
    yield f'    key = "{key_file}"'
    yield '    server_key = "..."  # the coordinator\'s public key, or its .pub file'
    yield f"and the line of {public_file.name} goes into the coordinator's list of allowed keys."
    yield ""
    yield "If it is the coordinator's, in the coordinator's configuration:"
    yield "    [security]"
    yield f'    key = "{key_file}"'
    yield '    allowed = "..."  # the list: the .pub lines of all daemons in one file'
    yield f'and every daemon has server_key = "{pair.public}".'


@click.command()
@asks
def reload(session: Session) -> None:
    """Have the coordinator read its list of admitted keys and the speeds of cables again, without a restart.

    These are the files security.allowed and transport.cables. A node whose key was taken off is removed as if it had
    died: its engines stop serving when their lease ends. Plans go by the new speeds from the next swap on. An unusable
    file is refused, and all settings stay. SIGHUP to the coordinator, or to a standalone daemon, has this effect, too.
    """
    with session.client() as client:
        report = client.reload()
    session.show(report, lambda report: say(*_read_again(report)))


def _read_again(report: ReloadReport) -> Iterator[str]:
    if report.cables:
        yield f"cables: as {report.cables} says"
    if report.absent:
        yield f"not here, though the cluster file has their speeds: {', '.join(report.absent)}"
    if not report.uses_keys:
        yield "the coordinator uses no keys" + ("" if report.cables else ": there is nothing to read again")
        return
    yield f"admitted: {', '.join(report.admitted)}"
    for node in report.removed:
        yield f"removed: node {node}, whose key is not admitted any more"
