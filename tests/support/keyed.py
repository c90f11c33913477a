"""A coordinator and daemons that know each other by keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import refitd
from refitd.protocol import keys
from refitd.testing import Coordinator, Daemon, eventually
from refitd.testing.daemon import free_port

JOIN_S = 60.0


class Head:
    """`refitd coordinator` listening on tcp, with a key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.pair = keys.generate("head")
        self._key, self.public_file = keys.write(self.pair, directory)
        self._allowed = directory / "allowed"
        self.process: Coordinator | None = None

    def start(self, *allowed: keys.KeyPair, more: str = "") -> None:
        """Start with this list."""
        self.allow(*allowed)
        text = f'[coordinator]\nendpoint = "{self.endpoint}"\n'
        text += f'[security]\nkey = "{self._key}"\nallowed = "{self._allowed}"\n{more}'
        self.process = Coordinator(text, name="head", folder=self._directory).start()

    def allow(self, *allowed: keys.KeyPair) -> None:
        """Write the list; a running coordinator reads it when asked to."""
        self._allowed.write_text("".join(f"{pair.public_line}\n" for pair in allowed))
        self._allowed.chmod(0o644)

    def stop(self) -> None:
        assert self.process is not None and self.process.stop() == []

    def log(self) -> str:
        return "" if self.process is None else self.process.log()


class Nodes:
    """Daemons that connect to `head`, each with its own key."""

    def __init__(self, head: Head, directory: Path, start_daemon: Callable[..., Daemon]) -> None:
        self._head, self._directory, self._start_daemon = head, directory, start_daemon

    def key(self, name: str) -> keys.KeyPair:
        pair = keys.generate(name)
        keys.write(pair, self._directory)
        return pair

    def start(self, name: str, *, key: keys.KeyPair, server_key: str = "", host: str = "", more: str = "") -> Daemon:
        endpoint = self._head.endpoint.replace("127.0.0.1", host or "127.0.0.1")
        server_key = server_key or str(self._head.public_file)
        text = f'[security]\nkey = "{self._directory / key.name}.key"\nserver_key = "{server_key}"\n'
        return self._start_daemon(text + more, name=name, joins=endpoint)


def joined(daemon: Daemon) -> list[str]:
    """The nodes that this node's coordinator knows, once it is connected."""
    with daemon.connect() as client:
        eventually(lambda: why_not(client) == "", f"a coordinator answers; log:\n{daemon.log()}", JOIN_S)
        return sorted(node.node for node in client.status().nodes)


def why_not(client: refitd.Client) -> str:
    try:
        client.status()
    except refitd.TransportError as exc:
        return str(exc)
    return ""
