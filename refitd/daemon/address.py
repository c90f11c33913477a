"""The address at which workers of other nodes reach this node's workers."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from refitd.config import Config
from refitd.errors import ConfigError


def reachable_address(config: Config) -> str:
    """Return node.address, or else the local address of the route to the coordinator. Sends no packet.

    Raises:
        ConfigError: the coordinator's host cannot be looked up, or no route leads there.
    """
    if config.node.address:
        return config.node.address
    endpoint = urlsplit(config.coordinator_endpoints[0])
    if endpoint.scheme != "tcp" or endpoint.hostname in (None, "*", "0.0.0.0", "::"):
        return "127.0.0.1"
    try:
        family, kind, _, _, there = socket.getaddrinfo(endpoint.hostname, endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as exc:  # the latter for a name with an empty or a long part
        raise ConfigError(
            f"coordinator.endpoint {config.coordinator_endpoint}: no address of this node leads there: {exc}; check "
            "the endpoint, or set node.address"
        ) from exc
