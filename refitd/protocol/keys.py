"""CURVE keys in files, and the roles that they admit.

Each process has a secret key and a public line to share. Lists have many public lines.

    n0.key   TOML, mode 0600        name = "n0"
                                    public = "..."
                                    secret = "..."
    n0.pub   one line, for anyone   n0 PUBLIC
    a list   such lines             n0 PUBLIC
                                    n1 PUBLIC node=n1 roles=engine,operator

Keys are 32 bytes, written as 40 characters (Z85, as ZeroMQ does). A list may have empty lines and lines that begin with
`#`; `cat *.pub` makes one. `node=NAME` restricts a key to one node name, `roles=` the clients of its node to these
roles. A line without them allows any node name and all roles.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from refitd.errors import ConfigError, RefusedError
from refitd.files import open_regular
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Message
from refitd.protocol.shards import Shard
from refitd.text import flaw

KEYGEN = "`refitctl keygen NAME` makes keys"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
SECRET_SUFFIX, PUBLIC_SUFFIX = ".key", ".pub"
_MAX_BYTES = 1 << 20
_OPEN_TO_OTHERS = 0o077
_WRITABLE_BY_OTHERS = 0o022


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The key pair of one process. Its repr omits the secret."""

    name: str
    public: str
    secret: str = field(repr=False)

    @property
    def public_line(self) -> str:
        """The line for a .pub file or a list."""
        return f"{self.name} {self.public}"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Keys of a listening end: its own, and all admitted public keys with their rights."""

    own: KeyPair
    allowed: Mapping[str, Allowed]


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Keys of a connecting end: its own, and the public key of its only peer."""

    own: KeyPair
    server: str


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    public: str
    secret: str


def generate(name: str) -> KeyPair:
    """Return a new key pair.

    Raises:
        ConfigError: the name cannot be a file name, or this ZeroMQ has no CURVE.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"key name {name!r}: at most 100 letters, digits, '_', '-' and '.' are expected, and neither '-' nor '.' "
            "first; the node's name is a good one"
        )
    if not zmq.has("curve"):
        raise ConfigError("this ZeroMQ was built without CURVE; install pyzmq from a wheel")
    while True:  # until neither could be taken for a path
        public, secret = (key.decode() for key in zmq.curve_keypair())
        if not is_path(public) and not is_path(secret):
            return KeyPair(name, public, secret)


def write(pair: KeyPair, directory: Path, *, replace: bool = False) -> tuple[Path, Path]:
    """Write NAME.key (0600) and NAME.pub (0644), both or neither; return both paths. The last folder may be missing.

    Raises:
        ConfigError: a file exists and may not be replaced, or cannot be written.
    """
    secret_path, public_path = (directory / f"{pair.name}{suffix}" for suffix in (SECRET_SUFFIX, PUBLIC_SUFFIX))
    text = (
        f"# The secret key of {pair.name}, for nobody but its process. {public_path.name} is for the others.\n"
        f'name = "{pair.name}"\npublic = "{pair.public}"\nsecret = "{pair.secret}"\n'
    )
    with contextlib.suppress(OSError):  # creating the first file reports the error
        directory.mkdir(exist_ok=True)
    _create(secret_path, text, 0o600, replace)
    try:
        _create(public_path, f"{pair.public_line}\n", 0o644, replace)
    except ConfigError:
        secret_path.unlink()
        raise
    return secret_path, public_path


def read(path: Path) -> KeyPair:
    """Read a .key file.

    Raises:
        ConfigError: it cannot be read, others may read it, or it is not a key.
    """
    text = _read(path, _OPEN_TO_OTHERS, "chmod 600", "a key file that `refitctl keygen NAME` has made")
    try:
        found = msgspec.convert(tomllib.loads(text), _KeyFile)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path}: not a key file: {exc}; {KEYGEN}") from exc
    except msgspec.ValidationError:
        # no details in the error: a damaged line may hold the secret
        raise ConfigError(f"{path}: not a key file, which holds name, public and secret; {KEYGEN}") from None
    for what, key in (("public", found.public), ("secret", found.secret)):
        if not is_key(key):
            raise ConfigError(f"{path}: {what} is not a key of 40 Z85 characters; {KEYGEN}")
    if zmq.curve_public(found.secret.encode()).decode() != found.public:
        raise ConfigError(f"{path}: public and secret do not belong together; {KEYGEN}")
    return KeyPair(found.name, found.public, found.secret)


def read_public(text: str) -> str:
    """Return the public key in `text`, or in the file of that name.

    Raises:
        ConfigError: it is neither, or the file does not hold one key.
    """
    if not is_path(text):
        if is_key(text):
            return text
        raise ConfigError(f"{text!r} is neither a public key of 40 Z85 characters nor a .pub file; {KEYGEN}")
    found = read_list(Path(text))
    if len(found) != 1:
        raise ConfigError(f"{text}: {len(found)} keys, expected the one of the coordinator; name its own .pub file")
    return next(iter(found))


def read_list(path: Path) -> dict[str, Allowed]:
    """Return the public keys of a list or .pub file, each with the rights on its line.

    Raises:
        ConfigError: it cannot be read, others may write it, a line is not `NAME KEY [node=NAME] [roles=ROLE,...]`,
            two lines of one key differ, or it holds no key.
    """
    advice = "the file holds the .pub line of every daemon (`cat *.pub`)"
    found: dict[str, Allowed] = {}
    for number, line in enumerate(_read(path, _WRITABLE_BY_OTHERS, "chmod go-w", advice).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 2 or not NAME.fullmatch(words[0]) or not is_key(words[1]):
            raise ConfigError(f"{path}: line {number} is not `NAME KEY` with a public key of 40 characters; {advice}")
        try:
            entry = _entry(words[0], words[2:])
        except ValueError as exc:
            raise ConfigError(
                f"{path}: line {number} is not `NAME KEY [node=NAME] [roles=ROLE,...]`: {exc}; {advice}"
            ) from exc
        if found.setdefault(words[1], entry) != entry:
            raise ConfigError(f"{path}: line {number} says of a key what an earlier line does not; leave one of them")
    if not found:
        raise ConfigError(f"{path}: no key in it; {advice}")
    return found


def _entry(name: str, words: list[str]) -> Allowed:
    node, roles = "", ALL_ROLES
    seen: set[str] = set()
    for word in words:
        what, _, value = word.partition("=")
        if what in seen or not value:
            raise ValueError(f"{word!r} is repeated or has no value")
        seen.add(what)
        if what == "node":
            node = value
        elif what == "roles":
            roles = read_roles(value.split(","))
        else:
            raise ValueError(f"{word!r} is neither node= nor roles=")
    return Allowed(name, node, roles)


def is_path(text: str) -> bool:
    """Whether a setting is a path: it begins with /, ./ or ../, ends as a key file does, or names an existing file.

    A path of 40 characters may be a well-formed key, because Z85 has the slash and the dot.
    """
    begins, ends = text.startswith(("/", "./", "../")), text.endswith((PUBLIC_SUFFIX, SECRET_SUFFIX))
    return begins or ends or os.path.exists(text)


def is_key(text: str) -> bool:
    """Whether the text is a well-formed key: 40 characters of Z85, 32 bytes."""
    try:
        return len(text) == 40 and len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):  # not in the alphabet, not ASCII, or a group exceeds 32 bits
        return False


def _create(path: Path, text: str, mode: int, replace: bool) -> None:
    try:
        if replace:
            path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            os.fchmod(fd, mode)
            file.write(text)
    except FileExistsError as exc:
        raise ConfigError(f"{path}: is there already; choose another name or directory, or pass --replace") from exc
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be written: {exc.strerror}; choose a directory this user can write") from exc


def _read(path: Path, forbidden: int, repair: str, advice: str) -> str:
    try:
        with open(open_regular(path), "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}; {advice}") from exc
    if found.st_uid not in (0, os.getuid()):
        raise ConfigError(f"{path}: belongs to uid {found.st_uid}, expected {os.getuid()} or 0; chown it")
    if found.st_mode & forbidden:
        raise ConfigError(f"{path}: mode {found.st_mode & 0o777:o} leaves it open to others; {repair} {path}")
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path}: more than {_MAX_BYTES} bytes; {advice}")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: byte {exc.start} is not ASCII; {advice}") from exc


DOMAIN = b"refitd"
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


@dataclass(frozen=True, slots=True)
class RefusedPeer:
    """A peer with a key that is not on the list."""

    key: str
    address: str


def _described(frames: list[bytes]) -> RefusedPeer:
    match frames:
        case [_, _, _, address, _, _, key] if len(key) == 32:
            # our sockets are IPv6, so IPv4 peers have mapped addresses
            return RefusedPeer(z85.encode(key).decode(), address.decode("ascii", "replace").removeprefix("::ffff:"))
    return RefusedPeer("", "")


class ZapHandler:
    """Answers ZeroMQ's admission requests; the loop that polls `socket` calls it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Collection[str]) -> None:
        self.admit(allowed)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ENDPOINT)

    def admit(self, allowed: Collection[str]) -> None:
        """Admit these keys, and no others, from now on."""
        self._allowed = {z85.decode(public): public for public in allowed}

    def answer(self) -> list[RefusedPeer]:
        """Answer all pending requests; return the refused peers."""
        refused: list[RefusedPeer] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return refused
            request = frames[1] if len(frames) > 1 else b""
            key = self._key(frames)
            # the User-Id of the peer's messages: the key, because several keys may share a name
            verdict = (b"400", b"key not allowed", b"") if key is None else (b"200", b"OK", key.encode())
            self.socket.send_multipart([_VERSION, request, *verdict, b""])
            if key is None:
                refused.append(_described(frames))

    def _key(self, frames: list[bytes]) -> str | None:
        match frames:
            case [version, _, domain, _, _, b"CURVE", key] if version == _VERSION and domain == DOMAIN:
                return self._allowed.get(key)
        return None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


# --- roles ------------------------------------------------------------------------------------------------

TRAINER, ENGINE, OPERATOR = "trainer", "engine", "operator"
ALL_ROLES = frozenset({TRAINER, ENGINE, OPERATOR})

# A trainer may swap: `client.swap` is part of its loop.
_SWAPS = frozenset({TRAINER, OPERATOR})
_NEEDED: dict[type[Message], frozenset[str]] = {
    local.CreateArena: frozenset({TRAINER, ENGINE}),
    sidecar.GiveArena: frozenset({TRAINER, ENGINE}),
    local.RegisterSource: frozenset({TRAINER}),
    local.GetUnrounded: frozenset({TRAINER}),
    local.RegisterTarget: frozenset({ENGINE}),
    local.Restored: frozenset({ENGINE}),
    local.Suspend: frozenset({ENGINE}),
    local.RegisterController: frozenset({ENGINE}),
    local.StartSwap: _SWAPS,
    local.StartSwaps: _SWAPS,
    local.AbortSwap: _SWAPS,
    local.Evict: _SWAPS,
    local.Forget: _SWAPS,
    local.Reload: frozenset({OPERATOR}),
    local.DrainNode: frozenset({OPERATOR}),
    local.Verify: _SWAPS,  # it reads every byte of every replica
    local.Publish: frozenset({TRAINER}),
    local.Wrote: frozenset({TRAINER}),
    local.BeginPublish: frozenset({TRAINER}),
}


@dataclass(frozen=True, slots=True)
class Allowed:
    """The rights of a public key: its owner's name, the node name it may use, the roles of that node's clients."""

    name: str
    node: str = ""  # "": any
    roles: frozenset[str] = ALL_ROLES


ANYONE = Allowed("")  # a peer without a key: file modes protect local sockets


def check_role(message: Message, roles: frozenset[str], who: str, where: str) -> None:
    """Refuse a message that none of `roles` may send.

    Args:
        message: the request.
        roles: the sender's roles.
        who: the sender's name, used in the error.
        where: the setting that gives the sender its roles, for the error.

    Raises:
        RefusedError: the sender lacks the role; the error names the message, both sets of roles and the setting.
    """
    if isinstance(message, cluster.AddShard):
        needed = frozenset({TRAINER if message.role == "source" else ENGINE})
    else:
        needed = _NEEDED.get(type(message), ALL_ROLES)
    if not needed & roles:
        raise RefusedError(
            f"{type(message).__name__} needs the role {listed(needed, ' or ')}, and {who} has "
            f"{listed(roles) or 'none'}; {where} gives roles"
        )


def read_roles(words: Iterable[str]) -> frozenset[str]:
    """Return roles by name.

    Raises:
        ValueError: a name is unknown.
    """
    found = frozenset(words)
    if unknown := sorted(found - ALL_ROLES):
        raise ValueError(f"{unknown[0]!r} is no role; roles are {listed(ALL_ROLES)}")
    return found


def listed(roles: Iterable[str], between: str = ", ") -> str:
    """Return roles as text for display."""
    return between.join(sorted(roles))


_NAMES = ("model", "replica", "name", "label", "device", "digest", "member")


def check_names(message: Message) -> None:
    """Refuse a message with an invalid name, in its fields or its tensors.

    A name is invalid if it contains NUL or cannot be encoded. Rules for one kind of request are where the daemon or the
    coordinator handles it, for instance in `refitd.daemon.new_members`.

    Raises:
        RefusedError: a name is invalid; the error names the field and the reason.
    """
    for place in _NAMES:
        name = getattr(message, place, "")
        if isinstance(name, str) and ("\0" in name or not name.isascii()):  # almost all names need no further check
            _check(f"{type(message).__name__}: {place}", (name,))
    shard = getattr(message, "shard", None)
    if isinstance(shard, Shard):
        check_tensor_names(shard)


def check_tensor_names(shard: Shard) -> None:
    """Refuse a description with an invalid tensor name.

    Raises:
        RefusedError: a name is invalid; the error names the tensor and the reason.
    """
    for tensor in shard.tensors:
        _check("tensor", (tensor.name, *tensor.aliases))
    for kept in shard.kept:
        _check("kept tensor", (kept.name, *kept.tensors))


def _check(what: str, names: Iterable[str]) -> None:
    for name in names:
        if found := flaw(name):
            raise RefusedError(f"{what} {name!r} {found}; choose another")
