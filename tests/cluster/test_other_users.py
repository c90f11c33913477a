"""The daemon's user: a client does not send to a daemon of a user that it did not name."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import refitd
from refitd.testing import Daemon
from tests.support import programs
from tests.support.trainer import ANSWER_S

LISTEN = """
import os, sys
sys.path[:0] = eval(sys.argv[1])
from pathlib import Path
import zmq
from refitd.buffers import handoff
from refitd.protocol import local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.channel import Router
from refitd.protocol.base import Decoder, encode
uid, directory, endpoint = int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
os.setgroups([]); os.setgid(uid); os.setuid(uid)
os.umask(0)
listener = handoff.listen(directory / "refitd.fds")
router = Router(zmq.Context(), f"ipc://{directory}/refitd.sock")
for name in ("refitd.fds", "refitd.sock"):
    (directory / name).chmod(0o666)
print("ready", flush=True)
decoder = Decoder(local.ClientRequest)
poller = zmq.Poller()
poller.register(router.socket, zmq.POLLIN)
poller.register(listener.fileno(), zmq.POLLIN)
kept = []
while True:
    ready = dict(poller.poll())
    if listener.fileno() in ready:
        kept.append(listener.accept()[0])
        greeting = sidecar.Greeting(token=b"0" * 16, endpoint=endpoint or f"ipc://{directory}/refitd.sock")
        handoff.send(kept[-1], encode(0, greeting))
    if router.socket in ready:
        received = router.receive()
        number, message = decoder.decode(received.frame)
        print(type(message).__name__, flush=True)
        answer = local.Failure(code="refused", message="it is only for show")
        if isinstance(message, local.Hello):
            answer = local.Welcome(protocol=PROTOCOL_VERSION, node="theirs", host="h", coordinator=False)
        router.send(received.identity, number, answer)
"""
VISIT = """
import os, sys
sys.path[:0] = eval(sys.argv[1])
import encodings.idna, refitd, refitd.client, refitd_cli.control, refitd_cli.commands.status, click.testing
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
if sys.argv[3] == "refitctl":
    refitd_cli.control.main(sys.argv[4:], prog_name="refitctl")
try:
    with refitd.connect(sys.argv[3] or None, name="victim", uid=eval(sys.argv[4])) as client:
        print("connected to", client.node)
except refitd.RefitdError as exc:
    print(type(exc).__name__, exc)
"""
# user ids per process: tests of other processes may run in parallel
OTHER, VICTIM = 2_000_000_000 + os.getpid(), 2_100_000_000 + os.getpid()


def _visit(uid: int, directory: Path | str, *words: object, **env: str) -> str:
    command = [sys.executable, "-c", VISIT, repr([str(programs.ROOT), *sys.path]), str(uid), str(directory)]
    command += map(str, words or (None,))
    given = {k: v for k, v in os.environ.items() if not k.startswith(("REFITD_", "XDG_"))} | env
    ran = programs.run(command, env=given)
    return ran.stdout + ran.stderr


class OthersDaemon:
    """A fake daemon of another user, in its victim's default directory and accessible to the victim."""

    def __init__(self, endpoint: str = "") -> None:
        self.directory = Path(f"/tmp/refitd-{VICTIM}")
        self.directory.mkdir(mode=0o711)
        os.chown(self.directory, OTHER, OTHER)
        path = repr([str(programs.ROOT), *sys.path])
        command = [sys.executable, "-c", LISTEN, path, str(OTHER), str(self.directory), endpoint]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        self.pid = self._process.pid

    def heard(self) -> list[str]:
        """End the fake daemon; return the messages that it received."""
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait(ANSWER_S)
        with self._process.stdout as said:
            return said.read().split()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_S)
        shutil.rmtree(self.directory)


@pytest.fixture
def listen_as_another_user() -> Iterator[Callable[..., OthersDaemon]]:
    if os.getuid() != 0:
        pytest.skip("only root can start processes of other users")
    started: list[OthersDaemon] = []

    def listen(endpoint: str = "") -> OthersDaemon:
        started.append(OthersDaemon(endpoint))
        return started[-1]

    yield listen
    for one in started:
        one.close()


def test_a_client_says_nothing_to_the_daemon_of_a_user_it_did_not_name(
    listen_as_another_user: Callable[..., OthersDaemon],
) -> None:
    theirs = listen_as_another_user()
    refused = _visit(VICTIM, "")  # the default directory, which another user created first
    assert "RefusedError" in refused and f"belongs to uid {OTHER}" in refused, refused
    assert f"refitd.connect(..., uid={OTHER})" in refused and f"REFITD_DAEMON_UID={OTHER}" in refused
    assert "RefusedError" in _visit(VICTIM, theirs.directory)
    assert "RefusedError" in _visit(0, theirs.directory), "root, too, is asked whose it means"
    assert f"expected uid {VICTIM}" in _visit(VICTIM, theirs.directory, VICTIM), "one that is stated is the only one"
    assert "REFITD_DAEMON_UID is 'me'" in _visit(VICTIM, theirs.directory, REFITD_DAEMON_UID="me")
    assert "did you mean REFITD_DAEMON_UID" in _visit(VICTIM, theirs.directory, REFITD_DAEMON_UDI="0")
    refused = _visit(VICTIM, "refitctl", "status", "--address", theirs.directory)
    assert f"refitctl --uid {OTHER}" in refused, refused
    # its directory may also look like the victim's: only the kernel's word on the listener counts
    os.chown(theirs.directory, VICTIM, VICTIM)
    assert f"the daemon here (pid {theirs.pid}) belongs to uid {OTHER}" in _visit(VICTIM, "")
    os.chown(theirs.directory, OTHER, OTHER)
    assert theirs.heard() == []


def test_a_client_that_names_another_users_daemon_is_connected(
    listen_as_another_user: Callable[..., OthersDaemon],
) -> None:
    theirs = listen_as_another_user()
    assert _visit(VICTIM, theirs.directory, OTHER) == "connected to theirs\n"
    assert _visit(VICTIM, theirs.directory, REFITD_DAEMON_UID=str(OTHER)) == "connected to theirs\n"
    said = _visit(VICTIM, "refitctl", "status", "--address", theirs.directory, "--uid", OTHER)
    assert "only for show" in said, said
    assert theirs.heard() == ["Hello", "Hello", "Hello", "GetStatus"]


def test_a_daemon_that_hands_out_a_socket_elsewhere_is_left(
    listen_as_another_user: Callable[..., OthersDaemon], tmp_path: Path
) -> None:
    theirs = listen_as_another_user(f"ipc://{tmp_path}/refitd.sock")
    assert "not in this directory" in _visit(0, theirs.directory, OTHER)
    # a socket of another user at the right path
    (theirs.directory / "refitd.sock").unlink()
    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind(str(theirs.directory / "refitd.sock"))
        assert "RefusedError" in _visit(0, theirs.directory, OTHER)
    assert theirs.heard() == []


def test_a_directory_that_others_can_write_to_is_no_daemons(shared_daemon: Daemon, tmp_path: Path) -> None:
    shared_daemon.directory.chmod(0o777)
    try:
        with pytest.raises(refitd.RefusedError, match="mode 777"):
            shared_daemon.connect()
    finally:
        shared_daemon.directory.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(shared_daemon.directory)
    with refitd.connect(link) as client:  # a link of this user, named explicitly
        assert client.node == "n0"
    os.lchown(link, OTHER, OTHER)
    with pytest.raises(refitd.RefusedError, match=f"uid {OTHER}"):
        refitd.connect(link)
