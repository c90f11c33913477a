"""Configuration, read once. Precedence: command line > environment > TOML file > default."""

from __future__ import annotations

import difflib
import os
import re
import socket
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from refitd.errors import ConfigError
from refitd.files import read_regular
from refitd.text import flaw, mismatch, unprintable

Role = Literal["trainer", "engine", "operator"]
LAST_PORT = (1 << 16) - 1
MAX_CONFIG_BYTES = 16 << 20
MAX_PORT = LAST_PORT - 1  # the next one is a standalone daemon's coordinator's
Positive = Annotated[float, msgspec.Meta(gt=0, le=86400)]


_MODELS = "REFITD_MODELS"
_OTHER_VARIABLES = ("REFITD_RUNTIME_DIR", "REFITD_DAEMON_UID")  # which clients read too


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file; unknown keys are refused."""


class NodeConfig(Section, frozen=True):
    """The daemon of one node."""

    name: Annotated[str, msgspec.Meta(max_length=200)] = ""  # "" means the host's name
    runtime_dir: str = ""  # "" means default_runtime_dir(); sockets live here, mode 0700
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    allowed_uids: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], ...] = ()  # besides the daemon's own user
    roles: dict[str, tuple[Role, ...]] = {}  # {uid or user name: roles}; all other admitted users have all roles
    max_arena_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 1 << 46  # all arenas together
    keep_targets_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 600.0  # how long to retain dead engines' staging
    address: Annotated[str, msgspec.Meta(max_length=200)] = ""  # where other nodes' workers reach this node's workers
    # "FIRST-LAST": the ports at which its workers listen, one for each; "": any free ones
    worker_ports: Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,5}-[0-9]{1,5})?$")] = ""
    cards: dict[str, str] = {}  # {GPU's UUID or number, or "main": network card}; others use the closest (workers.py)

    @property
    def worker_port_range(self) -> Sequence[int]:
        """The ports that workers may listen at; 0 is any."""
        first, _, last = self.worker_ports.partition("-")
        return range(int(first), int(last) + 1) if self.worker_ports else (0,)


class CoordinatorConfig(Section, frozen=True):
    """The coordinator, and how daemons reach it."""

    # "" means ipc in the runtime directory; tcp needs [security], even over loopback. A daemon may list several: the
    # coordinator and its standbys
    endpoint: str | Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=16)] = ""
    # a file, or etcd://HOST:PORT,HOST:PORT/PREFIX (etcds:// with TLS); "" means journal.sqlite in the runtime directory
    journal: Annotated[str, msgspec.Meta(max_length=2000)] = ""


class EtcdConfig(Section, frozen=True):
    """How a coordinator with its journal in etcd and etcd identify each other."""

    ca: str = ""  # the file of the authority that signed etcd's certificates; "": the system's authorities
    cert: str = ""  # this coordinator's certificate, and its key
    key: str = ""
    user: str = ""
    password_file: str = ""
    insecure: bool = False  # allow etcd:// (no TLS) to other hosts: a host on the path can decide which version is live


class EtcdPlace(msgspec.Struct, frozen=True):
    """The place of a journal in etcd."""

    members: tuple[tuple[str, int], ...]  # host and port
    prefix: str  # of all keys, with a slash before it and none after it
    tls: bool

    def __str__(self) -> str:
        members = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.members)
        return f"etcd{'s' if self.tls else ''}://{members}{self.prefix}"


class SecurityConfig(Section, frozen=True):
    """The keys that authenticate a coordinator and the daemons of other hosts. Not used over ipc."""

    key: str = ""  # this process's .key file
    server_key: str = ""  # for a daemon: the coordinator's public key, or its .pub file
    allowed: str = ""  # for the coordinator: a file with the .pub lines of the daemons that it admits


class TransportConfig(Section, frozen=True):
    """How bytes move between nodes. The coordinator's settings apply to all nodes."""

    service: Annotated[str, msgspec.Meta(min_length=1, max_length=100)] = "gloo"
    lanes: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0  # workers of each node that take part; 0: all
    staging_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=1 << 34)] = 32 << 20  # buffers of each worker
    relays: bool = True  # nodes pass on to others what they have received, where that is faster (gloo, NIXL)
    deltas: bool = True  # send what has changed since the version that the engines serve, where that is shorter
    # a cluster file (refitd/clusters.py) with the speeds of the nodes' cables; "": all are equally fast
    cables: Annotated[str, msgspec.Meta(max_length=2000)] = ""


class Deadlines(Section, frozen=True):
    """The longest time, in seconds, for each phase of a swap and each wait for a peer."""

    plan_s: Positive = 60.0
    stage_s: Positive = 300.0
    commit_s: Positive = 60.0
    connect_s: Positive = 10.0
    request_s: Positive = 120.0
    pause_s: Positive = 30.0  # for an engine to pause when asked
    # how long engines serve without news from the coordinator, which sends some every second
    lease_s: Annotated[float, msgspec.Meta(ge=2.0, le=86400)] = 10.0
    queue_s: Positive = 600.0  # for a requested swap to wait for earlier ones


class ModelConfig(Section, frozen=True):
    """Settings of one model."""

    auto_swap: bool = False  # swap as soon as a version is complete
    verify: bool = True  # compare staged bytes with their source, and keep digests of the live version
    catch_up: bool = True  # bring replicas that join or return to the live version
    check_replicas: bool = True  # abort swaps if source ranks hold different values for the same elements
    # names (with fnmatch wildcards) of replicas that may register; empty: any, by any user with the engine role
    replicas: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=200)], ...] = ()


class LogConfig(Section, frozen=True):
    """How much is logged. Log lines go to stderr."""

    level: Annotated[str, msgspec.Meta(pattern="^(debug|info|warning|error)$")] = "info"
    format: Annotated[str, msgspec.Meta(pattern="^(text|json)$")] = "text"


class MetricsConfig(Section, frozen=True):
    """Where a process serves its metrics, over HTTP."""

    # "HOST:PORT", or a port of 127.0.0.1; "": nowhere. A standalone daemon's coordinator takes the next port
    endpoint: str | Annotated[int, msgspec.Meta(ge=0)] = ""
    # names that clients may use for the endpoint, besides localhost and this host's; addresses are always allowed
    hosts: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=253)], ...] = ()

    @property
    def address(self) -> tuple[str, int] | None:
        """The host and port to listen on, port 0 for any free one; None for nowhere."""
        if self.endpoint == "":
            return None
        host, _, port = str(self.endpoint).rpartition(":")
        return host.strip("[]") or "127.0.0.1", int(port)

    @property
    def of_coordinator(self) -> MetricsConfig:
        """Return the settings for the coordinator that a standalone daemon starts: the next port."""
        if self.address is None or self.address[1] == 0:
            return self
        host, port = self.address
        return MetricsConfig(f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}", self.hosts)


class Config(Section, frozen=True):
    """The whole configuration."""

    node: NodeConfig = NodeConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    security: SecurityConfig = SecurityConfig()
    transport: TransportConfig = TransportConfig()
    deadlines: Deadlines = Deadlines()
    models: dict[str, ModelConfig] = {}
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
    etcd: EtcdConfig = EtcdConfig()

    @property
    def node_name(self) -> str:
        """The node's name; by default the host's name."""
        return self.node.name or socket.gethostname()

    @property
    def runtime_dir(self) -> Path:
        """The directory of the sockets."""
        return Path(self.node.runtime_dir) if self.node.runtime_dir else default_runtime_dir()

    @property
    def coordinator_endpoints(self) -> tuple[str, ...]:
        """The ZeroMQ endpoints of the coordinator and its standbys."""
        found = self.coordinator.endpoint or f"ipc://{self.runtime_dir / 'coordinator.sock'}"
        return (found,) if isinstance(found, str) else found

    @property
    def coordinator_endpoint(self) -> str:
        """The endpoints of the coordinator and its standbys as one text, for display."""
        return ", ".join(self.coordinator_endpoints)

    @property
    def uses_keys(self) -> bool:
        """Whether the coordinator and its daemons authenticate by keys."""
        return not self.coordinator_endpoints[0].startswith("ipc://")

    @property
    def journal_place(self) -> Path | EtcdPlace:
        """Where the coordinator's journal is."""
        if self.coordinator.journal.startswith(("etcd://", "etcds://")):
            return etcd_place(self.coordinator.journal)
        return Path(self.coordinator.journal or self.runtime_dir / "journal.sqlite")


def default_runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default directory for a daemon's sockets, where clients look for them.

    Raises:
        ConfigError: a variable is almost REFITD_RUNTIME_DIR or REFITD_DAEMON_UID.
    """
    if found := environ.get("REFITD_RUNTIME_DIR"):
        return Path(found)
    for variable in sorted(environ.keys() - set(_OTHER_VARIABLES)):
        is_ours = variable.startswith("REFIT") and "__" not in variable
        if is_ours and (close := difflib.get_close_matches(variable, _OTHER_VARIABLES, 1, 0.85)):
            raise ConfigError(f"{variable}: it would have no effect; did you mean {close[0]}?")
    if base := environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "refitd"
    return Path(f"/tmp/refitd-{os.getuid()}")


def etcd_place(text: str) -> EtcdPlace:
    """Read etcd://HOST:PORT,HOST:PORT/PREFIX.

    Raises:
        ConfigError: it is not of this form.
    """
    found = re.fullmatch(r"(etcds?)://([^/]+)(/.*)?", text)
    members: list[tuple[str, int]] = []
    for member in found[2].split(",") if found is not None else ():
        parts = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):([0-9]{1,5})", member)
        if parts is None or not 0 < int(parts[2]) <= LAST_PORT:
            break
        members.append((parts[1].strip("[]"), int(parts[2])))
    else:
        prefix = ((found[3] if found is not None else None) or "").rstrip("/") or "/refitd"
        if found is not None and len(members) <= 16 and re.fullmatch(r"(/[\w.-]+)+", prefix):
            return EtcdPlace(tuple(dict.fromkeys(members)), prefix, found[1] == "etcds")
    raise ConfigError(
        f"coordinator.journal {text!r} is not etcd://HOST:PORT,HOST:PORT/PREFIX (etcds:// with TLS), with up to 16 "
        "members and a prefix of letters, digits and .-_/ that no other cluster has"
    )


def load(path: str | Path | None, environ: Mapping[str, str] = os.environ, **flags: Any) -> Config:
    """Return the configuration that `read` reads; raises what it raises."""
    return read(path, environ, **flags)[0]


def read(
    path: str | Path | None, environ: Mapping[str, str] = os.environ, **flags: Any
) -> tuple[Config, dict[str, str]]:
    """Read `path` (None: defaults), then REFITD_NODE__WORKERS=4 style variables, then `flags` ("node.workers": 4).

    $REFITD_MODELS holds the tables of models: '{ "NAME" = { auto_swap = true } }'.

    Return the configuration, and for each key that is set ("node.workers") what has set it: the file, the variable or
    the flag.

    Raises:
        ConfigError: the file cannot be read, is not TOML, has an unknown key or a bad value; or a variable
            is misspelt.
    """
    values: dict[str, Any] = {}
    where = "configuration"
    if path is not None:
        where = str(path)
        if found := flaw(where):
            raise ConfigError(f"--config {where!r} {found}; pass --config FILE")
        try:
            values = tomllib.loads(read_regular(path, MAX_CONFIG_BYTES).decode())
        except OSError as exc:
            raise ConfigError(f"{path}: cannot be read: {exc.strerror}; pass --config FILE") from exc
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{path}: not TOML: {exc}") from exc
    origins: dict[str, str] = {}
    for section, table in values.items():
        for key in table if isinstance(table, dict) else ():
            _note(origins, f"{section}.{key}", table[key], where)
    for variable, text in sorted(environ.items()):
        if variable == _MODELS:
            for name, table in _models(text).items():
                for key, value in table.items():
                    _set(values.setdefault("models", {}), name, key, value, variable)
                    _note(origins, f"models.{name}.{key}", value, variable)
            continue
        _check_spelling(variable)
        section, _, key = variable.removeprefix("REFITD_").lower().partition("__")
        if variable.startswith("REFITD_") and key:
            _set(values, section, key, _parse(text), variable)
            _note(origins, f"{section}.{key}", values[section][key], variable)
    for dotted, value in flags.items():
        if value is not None:
            section, _, key = dotted.partition(".")
            _set(values, section, key, value, dotted)
            _note(origins, dotted, value, dotted)
    try:
        config = msgspec.convert(values, Config, strict=True)
    except msgspec.ValidationError as exc:
        raise ConfigError(_explained(str(exc), origins, where)) from exc
    _check(config, where)
    return config, origins


def _note(origins: dict[str, str], dotted: str, value: Any, origin: str) -> None:
    """Note what has set a key and, if it is a table, the keys inside it."""
    for inside in [name for name in origins if name.startswith(f"{dotted}.")]:
        del origins[inside]
    origins[dotted] = origin
    if isinstance(value, dict):
        origins.update({f"{dotted}.{key}": origin for key in value})


def _explained(problem: str, origins: Mapping[str, str], where: str) -> str:
    """Return msgspec's error text, prefixed with the variable, flag or file that the value comes from."""
    said, _, at = problem.rpartition(" - at ")
    path, _, inside = at.strip("`").partition("[") if said else ("$", "", "")
    known = re.search(r"unknown field `([^`]*)`", problem)
    hint = ""
    if known is not None:
        hint = _meant(path.removeprefix("$").removeprefix("."), known[1])
        path = path if inside else f"{path}.{known[1]}"
    # a variable may set the key, the table around it, or a value inside it
    found = [
        origin
        for key, origin in origins.items()
        if origin != where
        and (f"{path}.".startswith(f"$.{key}.") or (f"$.{key}.".startswith(f"{path}.") and path != "$"))
    ]
    place, sentence = mismatch(problem)
    return (
        f"{', '.join(dict.fromkeys(found)) or where}: {place or 'the file'}: {sentence}{hint}; "
        "`refitctl docs configs/laptop.toml` prints every key with comments"
    )


def _keys(section: str) -> list[str]:
    """Return the keys of a section, or the sections for ""; [] for an unknown section."""
    kinds = {"": Config, **{f.name: f.type for f in msgspec.structs.fields(Config)}, "models": ModelConfig}
    kind = kinds.get(section)
    if not (isinstance(kind, type) and issubclass(kind, Section)):
        return []
    return [f.name for f in msgspec.structs.fields(kind)]


def _meant(section: str, key: str) -> str:
    close = difflib.get_close_matches(key, _keys(section), 1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _models(text: str) -> dict[str, dict[str, Any]]:
    """Return the tables of $REFITD_MODELS; raises ConfigError if it is not a table of tables."""
    found = _parse(text)
    if isinstance(found, dict) and all(isinstance(table, dict) for table in found.values()):
        return found
    raise ConfigError(f"{_MODELS} is {text[:80]!r}, expected tables of TOML: '{{ \"NAME\" = {{ auto_swap = true }} }}'")


def _check_spelling(variable: str) -> None:
    """Refuse a variable that is almost one of ours, such as REFITD_WORKERS or REFITD_NODE_WORKERS: it has no effect."""
    if variable.startswith(f"{_MODELS}_"):
        raise ConfigError(
            f"{variable}: a variable's name cannot hold every model's name; "
            f"set {_MODELS}='{{ \"NAME\" = {{ auto_swap = true }} }}'"
        )
    prefix, _, rest = re.sub("[^a-z]+", "_", variable.lower()).strip("_").partition("_")
    is_ours = variable.startswith("REFITD_") and "__" in variable
    if prefix not in ("refitd", "refit") or is_ours or variable in _OTHER_VARIABLES:
        return
    meant: dict[str, list[str]] = {}
    for section in (each for each in _keys("") if each != "models"):
        for key in _keys(section):
            for spelling in (key, f"{section}_{key}"):
                meant.setdefault(spelling, []).append(f"REFITD_{section}__{key}".upper())
    # high enough for variables that Kubernetes sets for a service called refitd, such as REFITD_COORDINATOR_PORT
    if close := difflib.get_close_matches(rest, meant, 1, 0.85):
        raise ConfigError(f"{variable}: it would have no effect; did you mean {' or '.join(meant[close[0]])}?")


def _set(values: dict[str, Any], section: str, key: str, value: Any, origin: str) -> None:
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{origin}: [{section}] is not a table")
    table[key] = value


def _parse(text: str) -> Any:
    if "#" in text and not text.startswith(('"', "'", "[", "{")):
        return text  # a key, for instance: TOML would read the rest as a comment
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _texts(value: Any, dotted: str = "") -> Iterator[tuple[str, str]]:
    """Yield (place, text) for every text of a configuration, including the names of tables."""
    if isinstance(value, str):
        yield dotted, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"a name in {dotted or 'the file'}:", str(key)
            yield from _texts(inner, f"{dotted}.{key}" if dotted else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, dotted)


def _check(config: Config, where: str) -> None:
    for dotted, text in _texts(msgspec.to_builtins(config)):
        if found := unprintable(text):
            raise ConfigError(f"{where}: {dotted} {text!r} {found}")
    _check_coordinator(config, where)
    metrics = str(config.metrics.endpoint)
    if metrics and not re.fullmatch(r"((\[[0-9a-fA-F:.]+\]|[\w.-]+):)?[0-9]{1,5}", metrics):
        raise ConfigError(f"{where}: metrics.endpoint {metrics!r} is neither HOST:PORT nor PORT; IPv6 as [::1]:PORT")
    if metrics and int(metrics.rpartition(":")[2]) > MAX_PORT:
        raise ConfigError(f"{where}: metrics.endpoint {metrics!r}: choose a port up to {MAX_PORT}")
    for name in config.metrics.hosts:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"{where}: metrics.hosts: {name!r} is no host's name; give names without scheme and port")
    limit = 100  # sun_path holds 108 bytes
    if len(str(config.runtime_dir)) + len("/coordinator.sock") > limit:
        raise ConfigError(
            f"{where}: node.runtime_dir {config.runtime_dir} is too long for a socket path "
            f"(at most {limit - len('/coordinator.sock')} characters)"
        )


def _check_coordinator(config: Config, where: str) -> None:
    endpoints = config.coordinator_endpoints
    for endpoint in endpoints:
        if not endpoint.startswith(("ipc://", "tcp://")):
            raise ConfigError(f"{where}: coordinator.endpoint {endpoint!r} is neither ipc://PATH nor tcp://HOST:PORT")
        port = endpoint.rpartition(":")[2]
        if endpoint.startswith("tcp://") and not (
            re.fullmatch(r"tcp://(\*|\[[^\[\]/]+\]|[\w.-]+):[0-9]{1,5}", endpoint) and 0 < int(port) <= LAST_PORT
        ):
            raise ConfigError(
                f"{where}: coordinator.endpoint {endpoint!r} is not tcp://HOST:PORT with a port from 1 to {LAST_PORT}; "
                "IPv6 as tcp://[::1]:PORT"
            )
        if endpoints.count(endpoint) > 1 or endpoint[:3] != endpoints[0][:3]:
            raise ConfigError(
                f"{where}: coordinator.endpoint lists {endpoint!r}, which it lists twice, or which is not like "
                f"{endpoints[0]!r}; list each coordinator once, all with tcp:// or all with ipc://"
            )
    if config.uses_keys and not config.security.key:
        raise ConfigError(
            f"{where}: coordinator.endpoint {config.coordinator_endpoint!r} is tcp://, which every user of this host "
            "can connect to, and security.key is not set: make keys for the coordinator and for each daemon (`refitctl "
            "keygen HEAD` and `refitctl keygen NODE`; they say what else to set), or, on one host, use ipc://PATH"
        )
    try:
        place = config.journal_place
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from None
    if isinstance(place, EtcdPlace):
        _check_etcd(config.etcd, place, where)
    elif "://" in config.coordinator.journal:
        raise ConfigError(
            f"{where}: coordinator.journal {config.coordinator.journal!r} is neither a file's path nor "
            "etcd://HOST:PORT/PREFIX"
        )


def _check_etcd(etcd: EtcdConfig, place: EtcdPlace, where: str) -> None:
    if not place.tls and (etcd.ca or etcd.cert):
        raise ConfigError(f"{where}: etcd.ca and etcd.cert are for TLS; write etcds:// in coordinator.journal {place}")
    if bool(etcd.user) != bool(etcd.password_file) or (etcd.key and not etcd.cert):
        raise ConfigError(f"{where}: etcd.user needs etcd.password_file and the reverse; etcd.key needs etcd.cert")
    far = [host for host, _ in place.members if not _is_loopback(host)]
    if far and not place.tls and not etcd.insecure:
        raise ConfigError(
            f"{where}: coordinator.journal {place} reaches {far[0]} without TLS: a host on the path could decide which "
            "version is live; write etcds:// (see [etcd]), or set etcd.insecure = true where the network is your own"
        )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None
