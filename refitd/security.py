"""Which keys a process uses between hosts, from its configuration."""

from __future__ import annotations

from pathlib import Path

from refitd.config import Config
from refitd.errors import ConfigError
from refitd.protocol import keys


def coordinator_keys(config: Config) -> keys.ServerKeys | None:
    """Return the coordinator's key and the keys it lets in; None where it needs no keys.

    Raises:
        ConfigError: a key is missing or cannot be used.
    """
    if not config.uses_keys:
        return None
    allowed = _needed(config, "allowed", "the file that lists the public keys of the daemons")
    return keys.ServerKeys(_own(config), keys.read_list(Path(allowed)))


def daemon_keys(config: Config) -> keys.ClientKeys | None:
    """Return the daemon's key and the coordinator's public one; None where it needs no keys.

    Raises:
        ConfigError: a key is missing or cannot be used.
    """
    if not config.uses_keys:
        return None
    server = _needed(config, "server_key", "the coordinator's public key or its .pub file")
    return keys.ClientKeys(_own(config), keys.read_public(server))


def _own(config: Config) -> keys.KeyPair:
    return keys.read(Path(_needed(config, "key", "this process's key file")))


def _needed(config: Config, name: str, what: str) -> str:
    value: str = getattr(config.security, name)
    if not value:
        raise ConfigError(
            f"coordinator.endpoint {config.coordinator_endpoint!r} is used with keys, but security.{name} is not set; "
            f"set it to {what} ({keys.KEYGEN})"
        )
    return value
