"""scripts/try-systemd: the units of configs/ under a real systemd, through restarts and failures."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from tests.schedulers.container import STATUS_NOT_ALLOWED, Container, Done, NotAllowed
from tests.schedulers.findings import Findings

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PROGRAMS = Path(__file__).parent / "programs"
WAIT_S = 60.0
# Shorter than the units' 180 and 30 s, to see the same events sooner.
SHORT_WATCHDOG = "[Service]\nWatchdogSec=6\n"
INTRO = (
    "configs/refitd.service and configs/refitd-coordinator.service, as they are, under systemd {systemd} of a booted "
    "Debian container (systemd-nspawn), with configs/node.toml, then configs/cluster; only WatchdogSec is shortened "
    "to 6 s for the rows about it."
)


class Trial:
    """One booted container, and the findings in it."""

    def __init__(self, container: Container) -> None:
        self.do, self.found = container, Findings()

    def systemctl(self, *words: str) -> Done:
        return self.do("systemctl", *words)

    def value(self, name: str, unit: str = "refitd") -> str:
        return self.do.must("systemctl", "show", "--value", "-p", name, unit).strip()

    def ctl(self, *words: str) -> Done:
        return self.do("refitctl", *words, user="refitd", REFITD_RUNTIME_DIR="/run/refitd", COLUMNS="200")

    def begin(self, name: str) -> None:
        """Start one of the programs as the units' user, in a separate unit."""
        self.do.must(
            *("systemd-run", "--quiet", f"--unit={name}", "--uid=refitd", "--setenv=REFITD_RUNTIME_DIR=/run/refitd"),
            *("/opt/refitd/bin/python", f"/programs/{name}.py"),
        )

    def journal(self, unit: str, *words: str) -> str:
        return self.do.must("journalctl", "--no-pager", "--output=cat", "-u", unit, *words)

    def now(self) -> str:
        """Return the time from which to read a journal; it excludes lines of the previous second."""
        time.sleep(1.1)
        return self.do.must("date", "+%Y-%m-%d %H:%M:%S").strip()

    def swap(self) -> tuple[bool, str]:
        """Once all processes are connected, swap to the newest version. Return whether the engine reports it."""
        deadline = time.monotonic() + WAIT_S
        while (
            done := self.ctl("swap", "policy", "--json", "--timeout", "30")
        ).returncode and time.monotonic() < deadline:
            time.sleep(0.5)
        if done.returncode:
            return False, done.stderr
        version = json.loads(done.stdout)["version"]
        served = self.do.until(lambda: f"serves {version}\n" in self.journal("engine"), 10)
        return (
            served,
            f"version {version} committed, {'and the engine has it' if served else 'but the engine does not say so'}",
        )

    def arenas(self) -> list[tuple[int, int]]:
        report = json.loads(self.ctl("status", "--json").stdout or "{}")
        return [(node["arenas"], node["arena_bytes"]) for node in report.get("nodes", [])]

    def main_pid(self, unit: str = "refitd") -> int:
        return int(self.value("MainPID", unit))


def start(t: Trial) -> None:
    for unit in ("refitd", "refitd-coordinator"):
        t.do.write(f"/etc/systemd/system/{unit}.service", (CONFIGS / f"{unit}.service").read_text())
    t.do.write("/etc/refitd/node.toml", (CONFIGS / "node.toml").read_text())
    t.systemctl("daemon-reload")
    began = time.monotonic()
    done = t.systemctl("start", "refitd")
    took = time.monotonic() - began
    seen = f"{t.value('ActiveState')} ({t.value('Type')}) after {took:.1f} s {done.stderr}"
    status = t.ctl("status")
    t.found.saw(
        "`systemctl start refitd` returns once clients can work (Type=notify)",
        seen,
        not done.returncode + status.returncode,
    )
    limits = t.do.must("cat", f"/proc/{t.main_pid()}/limits").splitlines()
    kept = "; ".join(" ".join(line.split()[:6]) for line in limits if "open files" in line or "core file" in line)
    privileged = "cap_sys_resource" in t.do.must("setpriv", "--dump")
    seen = kept + (
        "" if privileged else "; not the 65536 open files and the OOM score, which this machine lets no container raise"
    )
    t.found.saw("it has its limits", seen, "core file size 0 0" in kept and ("65536 65536" in kept or not privileged))


def healthy(t: Trial) -> None:
    t.begin("engine"), t.begin("trainer")
    served, seen = t.swap()
    t.found.saw("hardened as it is, it takes a trainer and an engine, and swaps", seen, served)
    lent = t.do("python", "/programs/lender.py", user="refitd", REFITD_RUNTIME_DIR="/run/refitd")
    t.found.saw(
        "its workers read a lent version in the trainer's arena",
        lent.stdout + lent.stderr[-300:],
        "committed arena" in lent.stdout,
    )
    proven = t.ctl("verify", "policy")
    t.found.saw(
        "`refitctl verify` proves what is served",
        (proven.stdout or proven.stderr).splitlines()[-1],
        proven.returncode == 0,
    )
    loud = t.journal("refitd", "-p", "warning")
    t.found.saw("`journalctl -u refitd -p warning` is empty", loud or "no line", not loud)
    lines = t.journal("refitd").splitlines()
    utc = [line for line in lines if "event=" in line]
    t.found.saw(
        "lines are in UTC, with offset",
        utc[-1] if utc else "no line",
        bool(utc) and all("+00:00" in line for line in utc),
    )


def killed_worker(t: Trial) -> None:
    since, worker = t.now(), t.do.must("pgrep", "-f", "refitd.worker").split()[0]
    t.do.must("kill", "-KILL", worker)
    t.do.until(lambda: worker in t.journal("refitd", "-p", "warning"), 10)
    loud = t.journal("refitd", "-p", "warning", "--since", since)
    t.found.saw("after a worker's SIGKILL, `journalctl -p warning` names it", loud, f"pid={worker}" in loud)
    served, seen = t.swap()
    t.found.saw("and a swap works", seen, served)


def reload(t: Trial) -> None:
    before, done = t.main_pid(), t.systemctl("reload", "refitd")
    served, seen = t.swap()
    t.found.saw(
        "`systemctl reload` leaves it running",
        f"status {done.returncode}, {seen}",
        not done.returncode and before == t.main_pid() and served,
    )


def restarted(t: Trial, how: str, end: tuple[str, ...], expected: str) -> None:
    """End the daemon, and check that it and its clients recover with their memory."""
    held, engine, pid, restarts = t.arenas(), t.main_pid("engine"), t.main_pid(), int(t.value("NRestarts"))
    began = time.monotonic()
    done = t.do(*end)
    back = t.do.until(lambda: t.main_pid() not in (0, pid) and t.value("ActiveState") == "active", WAIT_S)
    took = time.monotonic() - began
    again = t.do.until(lambda: t.arenas() == held, 30)
    more = int(t.value("NRestarts")) - restarts
    seen = f"{more} automatic restarts, active after {took:.1f} s; arenas {held} before, {t.arenas()} after"
    t.found.saw(f"{how}: {expected}", f"{done.stderr} {seen}", back and again and engine == t.main_pid("engine"))
    served, seen = t.swap()
    t.found.saw(f"{how}: then a swap works, with the same processes", seen, served and engine == t.main_pid("engine"))


def wrong(t: Trial) -> None:
    t.do.must("systemctl", "stop", "refitd")
    t.found.saw(
        "`systemctl stop` is a success",
        t.value("Result"),
        t.value("Result") == "success" and t.value("ActiveState") == "inactive",
    )
    left = t.do("pgrep", "-f", "refitd.worker|refitd.coordinator").stdout
    t.found.saw("and leaves no process", left or "none", not left)
    t.do.write("/etc/refitd/node.toml", (CONFIGS / "node.toml").read_text() + "\nwrokers = 4\n")
    since, began = t.now(), time.monotonic()
    done = t.systemctl("start", "refitd")
    took = time.monotonic() - began
    time.sleep(3)
    state, status, again = t.value("ActiveState"), t.value("ExecMainStatus"), t.value("NRestarts")
    seen = f"status {done.returncode} after {took:.1f} s, {state}, exit {status}, {again} restarts"
    ok = done.returncode != 0 and (state, status, again) == ("failed", "2", "0") and took < 10
    t.found.saw("a wrong configuration fails the start at once, and is not started again", seen, ok)
    said = t.journal("refitd", "-p", "err", "--since", since)
    t.found.saw("and `journalctl -p err` says what is wrong", said, "wrokers" in said)
    t.do.write("/etc/refitd/node.toml", (CONFIGS / "node.toml").read_text())
    t.systemctl("reset-failed", "refitd")
    t.do.must("systemctl", "start", "refitd")
    served, seen = t.swap()
    t.found.saw("after the correction, trainer and engine are back by themselves", seen, served)


def cluster(t: Trial) -> None:
    """The coordinator's unit, and a node's without --standalone, over TCP with keys."""
    t.do.must("systemctl", "stop", "engine", "trainer", "refitd")
    t.do.write("/etc/hosts", "127.0.0.1 localhost head refitd-try\n")
    for name in ("head", "a"):
        t.do.must("refitctl", "keygen", name, "--directory", "/etc/refitd")
        t.do.must("chown", "refitd:", f"/etc/refitd/{name}.key")
    public = t.do.must("cat", "/etc/refitd/a.pub")
    t.do.write("/etc/refitd/allowed", public)
    t.do.write("/etc/refitd/coordinator.toml", (CONFIGS / "cluster" / "coordinator.toml").read_text())
    t.do.write("/etc/refitd/node.toml", (CONFIGS / "cluster" / "node-a.toml").read_text())
    alone = "[Service]\nExecStart=\nExecStart=/opt/refitd/bin/refitd serve --config /etc/refitd/node.toml\n"
    t.do.write("/etc/systemd/system/refitd.service.d/cluster.conf", alone)
    t.systemctl("daemon-reload")
    since = t.now()
    done = t.systemctl("start", "refitd-coordinator", "refitd")
    t.begin("engine"), t.begin("trainer")
    served, seen = t.swap()
    t.found.saw(
        "coordinator and daemon as two units, over TCP with keys", done.stderr + seen, served and not done.returncode
    )
    loud = t.journal("refitd", "-p", "warning", "--since", since) + t.journal("refitd-coordinator", "-p", "warning")
    t.found.saw("`journalctl -p warning` of both is empty", loud or "no line", not loud)
    other = t.do.must("refitctl", "keygen", "b", "--directory", "/etc/refitd") and t.do.must("cat", "/etc/refitd/b.pub")
    t.do.write("/etc/refitd/allowed", other)
    coordinator = t.main_pid("refitd-coordinator")
    t.do.must("systemctl", "reload", "refitd-coordinator")
    out = t.do.until(lambda: "coordinator-refused" in t.journal("refitd", "-p", "warning", "--since", since), 30)
    t.found.saw(
        "a key off the list and `systemctl reload`: its daemon is refused",
        t.journal("refitd", "-p", "warning", "--since", since),
        out,
    )
    t.do.write("/etc/refitd/allowed", public)
    t.do.must("systemctl", "reload", "refitd-coordinator")
    served, seen = t.swap()
    t.found.saw(
        "and admitted again, all without a restart", seen, served and coordinator == t.main_pid("refitd-coordinator")
    )
    since = t.now()
    t.do.must("systemctl", "restart", "refitd-coordinator")
    served, seen = t.swap()
    lost = t.journal("trainer", "--since", since)
    t.found.saw(
        "`systemctl restart refitd-coordinator`: the daemon finds it again, no publish fails",
        f"{seen}; {lost}",
        served and not lost,
    )
    _hang(t, "refitd-coordinator")
    served, seen = t.swap()
    t.found.saw("and a swap works", seen, served)


def _hang(t: Trial, unit: str) -> None:
    t.do.write(f"/etc/systemd/system/{unit}.service.d/watchdog.conf", SHORT_WATCHDOG)
    t.systemctl("daemon-reload"), t.systemctl("restart", unit)
    t.swap()
    pid, since = t.main_pid(unit), t.now()
    t.do.must("kill", f"-{signal.SIGSTOP.value}", str(pid))
    began = time.monotonic()
    back = t.do.until(lambda: t.main_pid(unit) not in (0, pid) and t.value("ActiveState", unit) == "active", WAIT_S)
    said = [line for line in t.journal(unit, "--since", since).splitlines() if "atchdog" in line]
    seen = f"active again after {time.monotonic() - began:.1f} s; {' '.join(said)}"
    t.found.saw(f"{unit} hangs (SIGSTOP): the watchdog has it started again", seen, back and bool(said))


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) / "root"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # take the container down
    try:
        with Container(root, {PROGRAMS: "/programs"}) as container:
            t = Trial(container)
            systemd = container.must("systemctl", "--version").split()[1]
            start(t)
            healthy(t)
            killed_worker(t)
            reload(t)
            restarted(
                t,
                "`systemctl restart refitd`",
                ("systemctl", "restart", "refitd"),
                "its clients hand their arenas back",
            )
            restarted(
                t,
                "SIGKILL",
                ("kill", "-KILL", str(t.main_pid())),
                "it is started again, its clients hand their arenas back",
            )
            _hang(t, "refitd")
            served, seen = t.swap()
            t.found.saw("and a swap works", seen, served)
            wrong(t)
            cluster(t)
            if t.found.failed:
                for unit in ("refitd", "refitd-coordinator", "engine", "trainer"):
                    print(f"--- {unit}", *t.journal(unit).splitlines()[-60:], sep="\n", file=sys.stderr)
    except NotAllowed as error:
        print(f"refitd: not run here: {error}", file=sys.stderr)
        return STATUS_NOT_ALLOWED
    return t.found.keep(
        "systemd", "The units under a real systemd", INTRO.format(systemd=systemd), "--json" in arguments
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
