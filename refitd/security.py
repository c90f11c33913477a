"""Read from the configuration a process's keys, and the roles of a node's users."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from refitd.config import Config
from refitd.errors import ConfigError
from refitd.protocol import keys
from refitd.protocol.keys import ALL_ROLES


def coordinator_keys(config: Config) -> keys.ServerKeys | None:
    """Return the coordinator's key and the keys that it admits; None if it needs no keys.

    Raises:
        ConfigError: a key is missing or cannot be used.
    """
    if not config.uses_keys:
        return None
    allowed = _file(config, "allowed", "the file that lists the public keys of the daemons")
    return keys.ServerKeys(_own(config), keys.read_list(allowed))


def daemon_keys(config: Config) -> keys.ClientKeys | None:
    """Return the daemon's key and the coordinator's public key; None if it needs no keys.

    Raises:
        ConfigError: a key is missing or cannot be used.
    """
    if not config.uses_keys:
        return None
    server = _needed(config, "server_key", "the coordinator's public key or its .pub file")
    return keys.ClientKeys(_own(config), keys.read_public(server))


def coordinator_uids(config: Config) -> frozenset[int]:
    """Return the users whose daemons a coordinator on ipc admits; empty over tcp, where keys decide.

    Raises:
        ConfigError: as `node_users`.
    """
    return frozenset() if config.uses_keys else node_users(config).uids


@dataclass(frozen=True, slots=True)
class Users:
    """The users that may connect to a daemon, and their roles."""

    uids: frozenset[int]
    roles: Mapping[int, frozenset[str]]  # only for users with restricted roles; all others have all

    def roles_of(self, uid: int) -> frozenset[str]:
        """Return the roles of a user who may connect."""
        return self.roles.get(uid, ALL_ROLES)


def node_users(config: Config) -> Users:
    """Return the users who may connect (the daemon's own user and node.allowed_uids), with the roles of node.roles.

    Raises:
        ConfigError: node.roles names a user that does not exist or may not connect, or one user twice.
    """
    uids = frozenset({os.getuid(), *config.node.allowed_uids})
    roles: dict[int, frozenset[str]] = {}
    for name, given in config.node.roles.items():
        try:
            uid = int(name) if name.isascii() and name.isdigit() else pwd.getpwnam(name).pw_uid
        except (KeyError, ValueError) as exc:
            raise ConfigError(
                f"node.roles names {name!r}, which is no user of this host; `id NAME` shows them"
            ) from exc
        if uid not in uids:
            raise ConfigError(
                f"node.roles gives {name!r} (uid {uid}) roles, but it may not connect: add {uid} to node.allowed_uids"
            )
        if uid in roles:
            raise ConfigError(f"node.roles names uid {uid} twice, once as {name!r}; leave one of them")
        roles[uid] = frozenset(given)
    return Users(uids, roles)


def _own(config: Config) -> keys.KeyPair:
    return keys.read(_file(config, "key", "this process's key file"))


def _file(config: Config, name: str, what: str) -> Path:
    found = _needed(config, name, what)
    # perhaps a secret key, which an error about a missing file would print
    if keys.is_key(found) and not keys.is_path(found):
        raise ConfigError(f"security.{name} holds a key, or no file has this name; set it to the path of {what}")
    return Path(found)


def _needed(config: Config, name: str, what: str) -> str:
    value: str = getattr(config.security, name)
    if not value:
        raise ConfigError(
            f"coordinator.endpoint {config.coordinator_endpoint!r} is used with keys, but security.{name} is not set; "
            f"set it to {what} ({keys.KEYGEN})"
        )
    return value
