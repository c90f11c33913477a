"""Network namespaces joined by virtual cables: hosts, as far as sockets can tell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

from refitd.protocol import keys
from refitd.testing import Daemon, eventually
from refitd.testing.daemon import joined

COMMAND_S = 60.0


def why_not() -> str:
    """Return why namespaces cannot be made here, "" if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} (iproute2) is not installed"
    name = f"rfprobe{os.getpid()}"
    made = _run("ip", "netns", "add", name)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    there = name + "v", name + "w"
    cable = _run("ip", "link", "add", there[0][-15:], "type", "veth", "peer", "name", there[1][-15:])
    _run("ip", "link", "del", there[0][-15:])
    _run("ip", "netns", "del", name)
    return f"veth: {cable.stderr.strip()}" if cable.returncode else ""


class TwoHosts:
    """Namespaces `a` (10.77.0.1) and `b` (10.77.0.2). The caller closes it."""

    addresses = ("10.77.0.1", "10.77.0.2")
    coordinator = "10.77.0.3"  # another address of a, to make only the coordinator unreachable

    def __init__(self, which: str = "") -> None:
        """Make them; the first letter of `which` distinguishes several pairs of one process."""
        self.names = tuple(f"rf{os.getpid()}{which[:1]}{side}" for side in "ab")
        self._cables = tuple(f"v{os.getpid() % 10**8}{which[:1]}{side}" for side in "ab")
        try:
            for name in self.names:
                _must("ip", "netns", "add", name)
            _must("ip", "link", "add", self._cables[0], "type", "veth", "peer", "name", self._cables[1])
            for name, cable, address in zip(self.names, self._cables, self.addresses, strict=True):
                _must("ip", "link", "set", cable, "netns", name)
                _must("ip", "-n", name, "addr", "add", f"{address}/24", "dev", cable)
                _must("ip", "-n", name, "link", "set", "lo", "up")
                _must("ip", "-n", name, "link", "set", cable, "up")
            _must("ip", "-n", self.names[0], "addr", "add", f"{self.coordinator}/24", "dev", self._cables[0])
        except BaseException:
            self.close()
            raise

    def cable(self, *, up: bool) -> None:
        """Pull the cable, or plug it in."""
        _must("ip", "-n", self.names[1], "link", "set", self._cables[1], "up" if up else "down")

    def lose_way(self, address: str, *, lost: bool) -> None:
        """Drop, or again deliver, all packets of b to this address."""
        _must("ip", "-n", self.names[1], "route", "add" if lost else "del", "blackhole", f"{address}/32")

    def swallow(self, address: str, *, lost: bool) -> None:
        """Have packets of b to this address go where no host takes them, or arrive again; b gets no error."""
        there = ("lladdr", "02:00:00:00:00:01", "nud", "permanent") if lost else ()
        what = "replace" if lost else "del"
        _must("ip", "-n", self.names[1], "neigh", what, address, *there, "dev", self._cables[1])

    def limit(self, mbit: int, ends: str = "ab") -> None:
        """Limit the rate of these ends."""
        for end, name, cable in zip("ab", self.names, self._cables, strict=True):
            if end in ends:
                _limit(name, cable, mbit)

    def lose(self, percent: float) -> str:
        """Have both ends drop this share of received packets, at random; return the reason if they cannot, else ""."""
        if shutil.which("iptables") is None:
            return "iptables is not installed"
        random = ("-m", "statistic", "--mode", "random", "--probability", f"{percent / 100:.4f}", "-j", "DROP")
        for name, cable in zip(self.names, self._cables, strict=True):
            rules = ("ip", "netns", "exec", name, "iptables", "-w", "5")
            _must(*rules, "-F", "INPUT")
            done = _run(*rules, "-A", "INPUT", "-i", cable, *random) if percent else None
            if done is not None and done.returncode:
                return f"iptables: {done.stderr.strip()}"
        return ""

    def close(self) -> None:
        """Take everything down."""
        for name in self.names:
            _run("ip", "netns", "del", name)


class SwitchedHosts:
    """Namespaces with a cable each to one switch, itself a namespace. The caller closes it."""

    def __init__(self, count: int, mbit: int, which: str = "") -> None:
        """Make `count` of them, with addresses from 10.78.0.1; each cable carries `mbit` in each direction."""
        own = f"{os.getpid() % 10**6}{which[:1]}"
        self.names = tuple(f"rf{own}n{i}" for i in range(count))
        self.addresses = tuple(f"10.78.0.{i + 1}" for i in range(count))
        self._switch = f"rf{own}sw"
        try:
            for name in (self._switch, *self.names):
                _must("ip", "netns", "add", name)
                _must("ip", "-n", name, "link", "set", "lo", "up")
            _must("ip", "-n", self._switch, "link", "add", "sw", "type", "bridge")
            _must("ip", "-n", self._switch, "link", "set", "sw", "up")
            for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
                here, there = f"v{own}{i}", f"w{own}{i}"
                _must("ip", "link", "add", here, "type", "veth", "peer", "name", there)
                _must("ip", "link", "set", here, "netns", name)
                _must("ip", "link", "set", there, "netns", self._switch)
                _must("ip", "-n", name, "addr", "add", f"{address}/24", "dev", here)
                _must("ip", "-n", self._switch, "link", "set", there, "master", "sw")
                for netns, end in ((name, here), (self._switch, there)):
                    _must("ip", "-n", netns, "link", "set", end, "up")
                    _limit(netns, end, mbit)
        except BaseException:
            self.close()
            raise

    def _own(self, host: int) -> str:
        return f"{self.names[host].removeprefix('rf').rpartition('n')[0]}{host}"

    def cable(self, host: int, *, up: bool) -> None:
        """Pull a host's cable, or plug it in."""
        _must("ip", "-n", self.names[host], "link", "set", f"v{self._own(host)}", "up" if up else "down")

    def limit(self, host: int, *, send: int | None = None, receive: int | None = None) -> None:
        """Let a host's cable carry this many Mbit/s from now on, in the given directions."""
        if send is not None:
            _limit(self.names[host], f"v{self._own(host)}", send)
        if receive is not None:
            _limit(self._switch, f"w{self._own(host)}", receive)

    def lose_way(self, host: int, to: int, *, lost: bool) -> None:
        """Drop, or again deliver, all packets of one host to another."""
        address = f"{self.addresses[to]}/32"
        _must("ip", "-n", self.names[host], "route", "add" if lost else "del", "blackhole", address)

    def sent(self, host: int) -> int:
        """Return the bytes that a host has sent over its cable."""
        said = _must("ip", "-n", self.names[host], "-j", "-s", "link", "show")
        return sum(link["stats64"]["tx"]["bytes"] for link in json.loads(said) if link["ifname"] != "lo")

    def close(self) -> None:
        """Take everything down."""
        for name in (*self.names, self._switch):
            _run("ip", "netns", "del", name)


def start_daemons(
    hosts: TwoHosts | SwitchedHosts,
    port: int,
    folder: Path,
    start: Callable[..., Daemon],
    config: str = "",
    address: str = "",
) -> list[Daemon]:
    """Start a standalone daemon on host a, with node.address, and others on hosts b, c, ... that join it.

    They authenticate with keys in `folder`.
    """
    pairs = [keys.generate(name) for name in ascii_lowercase[: len(hosts.names)]]
    (folder / "allowed").write_text("".join(f"{pair.public_line}\n" for pair in pairs))
    found = []
    for pair, netns in zip(pairs, hosts.names, strict=True):
        key, _ = keys.write(pair, folder)
        given = {"REFITD_COORDINATOR__ENDPOINT": f"tcp://{hosts.addresses[0]}:{port}", "REFITD_SECURITY__KEY": str(key)}
        given["REFITD_SECURITY__SERVER_KEY"] = str(folder / "a.pub")
        if pair.name == "a":
            given["REFITD_SECURITY__ALLOWED"] = str(folder / "allowed")
            given |= {"REFITD_NODE__ADDRESS": address} if address else {}
        prefix = ("ip", "netns", "exec", netns)
        found.append(start(config, name=pair.name, standalone=pair.name == "a", environment=given, prefix=prefix))
    with found[0].connect("status") as client:
        eventually(lambda: joined(client) == len(found), "both nodes are there")
    return found


def _limit(netns: str, cable: str, mbit: int) -> None:
    """Limit the rate at which this end of a cable sends.

    The kernel hands over all that TCP sends in a millisecond as one packet. It cuts packets larger than the burst into
    frames of 1,500 bytes. A real NIC of this speed does not need that; with many cables it takes all cores.
    """
    burst_kbit = max(256, 2 * mbit)
    _must(
        *("tc", "-n", netns, "qdisc", "replace", "dev", cable, "root"),
        *("tbf", "rate", f"{mbit}mbit", "burst", f"{burst_kbit}kbit", "latency", "100ms"),
    )


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)


def _must(*command: str) -> str:
    done = _run(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout
