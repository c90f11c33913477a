"""scripts/try-slurm: configs/slurm-launch.sh under a real Slurm of three nodes, with jobs that end in every way."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

from tests.schedulers.container import STATUS_NOT_ALLOWED, Container, NotAllowed
from tests.schedulers.findings import Findings

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
JOB_S = 120.0
NODES = ("n1", "n2", "n3")
INTRO = (
    "configs/slurm-launch.sh, as it is, under Slurm {slurm} (slurmctld, munge and three slurmd of Debian). The "
    "nodes are network namespaces of one container, each with its host name, its address and its /tmp, joined by "
    "a bridge."
)
CONF = """
ClusterName=try
SlurmctldHost=ctl(10.78.0.1)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=15
SlurmctldPidFile=/run/slurmctld.pid
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd.%n
SlurmdPidFile=/run/slurmd.%n.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.%n.log
NodeName=n[1-3] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE = """
set -eu
ip netns add $1
ip link add $1 type veth peer name eth0 netns $1
ip link set $1 master bridge up
ip -n $1 link set lo up
ip -n $1 addr add $2/24 dev eth0
ip -n $1 link set eth0 up
systemd-run --quiet --unit=slurmd-$1 -p Delegate=yes -p NetworkNamespacePath=/run/netns/$1 -p PrivateTmp=yes \
    -p KillMode=process unshare --uts sh -c "hostname $1; exec slurmd -D -N $1"
"""


class Trial:
    """A cluster, and the findings on its jobs."""

    def __init__(self, container: Container) -> None:
        self.do, self.found = container, Findings()

    def begin(self) -> str:
        """Start Slurm; return its version."""
        addresses = {"ctl": "10.78.0.1", **{node: f"10.78.0.1{node[1]}" for node in NODES}}
        self.do.write(
            "/etc/hosts", "127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in addresses.items())
        )
        self.do.write("/etc/slurm/slurm.conf", CONF.format(cpus=self.do.must("nproc").strip()))
        self.do.write("/job/slurm-launch.sh", (ROOT / "configs" / "slurm-launch.sh").read_text())
        self.do.must(
            "sh",
            "-c",
            "chmod 777 /job; mkdir -p /var/spool/slurmctld; ip link add bridge type bridge; ip link set bridge up",
        )
        self.do.must("ip", "addr", "add", "10.78.0.1/24", "dev", "bridge")
        self.do.must("hostname", "ctl")
        self.do.must("systemctl", "start", "munge")
        self.do.must("systemd-run", "--quiet", "--unit=ctl", "slurmctld", "-D")
        for node in NODES:
            self.do.must("sh", "-c", NODE, "sh", node, addresses[node])
        if not self.do.until(lambda: self.do("sinfo", "--noheader", "-o", "%D %t").stdout.split() == ["3", "idle"], 60):
            logs = self.do(
                "sh", "-c", "sinfo -R; tail -n 30 /var/log/slurm*; journalctl --no-pager -u 'slurmd-*' | tail -n 30"
            ).stdout
            raise RuntimeError(f"Slurm does not start: {logs}")
        return self.do.must("sinfo", "--version").split()[-1]

    def submit(self, nodes: int, trainer: str, engine: str = "job_engine.py", **env: str) -> str:
        """Submit a job as the unprivileged user; return its number."""
        python = "/opt/refitd/bin/python /programs"
        lines = {"TRAINER": f"{python}/{trainer}", "ENGINE": f"{python}/{engine}", **env}
        words = [f"--nodes={nodes}", "--output=/job/%j.out", "--chdir=/job", "--parsable", "/job/slurm-launch.sh"]
        return self.do.must("sbatch", *words, user="refitd", **lines).strip()

    def state(self, job: str) -> str:
        found = self.do("scontrol", "show", "job", job).stdout
        return " ".join(re.findall(r"(?:JobState|ExitCode)=(\S+)", found))

    def output(self, job: str) -> str:
        return self.do("cat", f"/job/{job}.out").stdout

    def await_end(self, job: str) -> tuple[str, str]:
        """Return a job's state and its output, once it has ended and its nodes are free."""
        self.do.until(
            lambda: not re.search(r"PENDING|RUNNING|COMPLETING|CONFIGURING", self.state(job) or "PENDING"), JOB_S
        )
        return self.state(job), self.output(job)

    def left(self) -> str:
        """Return leftovers of jobs: processes, and folders in the nodes' /tmp."""
        self.do.until(lambda: not self.do("pgrep", "-u", "refitd").stdout, 10)
        processes = self.do("ps", "-u", "refitd", "-o", "pid=,args=").stdout.strip()
        folders = self.do(
            "sh", "-c", "ls -d /tmp/systemd-private-*-slurmd-*/tmp/refitd-job-* 2>/dev/null"
        ).stdout.strip()
        return f"{processes} {folders}".strip()


def whole(t: Trial) -> None:
    for nodes, env, engines in (
        (1, {}, ["n1"]),
        (2, {}, ["n2"]),
        (3, {}, ["n2", "n3"]),
        (3, {"TRAINER_NODES": "2"}, ["n3"]),
    ):
        job = t.submit(nodes, f"job_trainer.py {','.join(engines)} 3", **env)
        state, output = t.await_end(job)
        serve = [f"{engine} serves {version}" for engine in engines for version in (1, 2, 3)]
        ranks = [
            f"rank {rank} of {env.get('TRAINER_NODES', 1)} on n{rank + 1} has {nodes} nodes"
            for rank in range(int(env.get("TRAINER_NODES", 1)))
        ]
        said = ", ".join(
            line for line in output.splitlines() if re.search("trainer|serves|refit:", line) and "t=20" not in line
        )
        holds = state == "COMPLETED 0:0" and all(line in output for line in [*serve, *ranks, "trainer: proven"])
        t.found.saw(
            f"a job of {nodes} nodes{', two of trainers,' if env else ''} swaps 3 versions, and completes",
            f"{state}: {said}",
            holds,
        )
        if not holds:
            print(output, file=sys.stderr)
    left = t.left()
    t.found.saw("nothing is left on the nodes", left or "no process, no folder", not left)


def ends(t: Trial) -> None:
    state, output = t.await_end(t.submit(3, "job_trainer.py n2,n3 50", "job_engine.py n3:2"))
    named = _said(output)
    t.found.saw(
        "an engine dies: the job fails, with its name",
        f"{state}: {named}",
        state == "FAILED 1:0" and "the engine on n3 ended with status 137" in named,
    )
    state, output = t.await_end(t.submit(2, "job_trainer.py n2 1 fail"))
    t.found.saw(
        "the trainer fails: so does the job, with its status", f"{state}: {_said(output)}", state == "FAILED 7:0"
    )
    for empty in ("TRAINER", "ENGINE"):
        state, output = t.await_end(t.submit(1, "job_trainer.py n1 1", **{empty: ""}))
        holds = state.startswith("FAILED") and f"{empty}: the command that" in output
        t.found.saw(f"an empty {empty} is an error", f"{state}: {output[-200:]}", holds)
    t.do.write("/job/wrong.toml", "wrokers = 4\n", mode="0644")
    began = time.monotonic()
    state, output = t.await_end(t.submit(2, "job_trainer.py n2 1", REFITD_CONFIG="/job/wrong.toml"))
    holds = state == "FAILED 1:0" and "wrokers" in output and "ended with status 2" in _said(output)
    t.found.saw(
        "a wrong configuration: the job ends before it begins",
        f"{state} after {time.monotonic() - began:.0f} s: {_said(output)}",
        holds,
    )
    job = t.submit(3, "job_trainer.py n2,n3 100000")
    t.do.until(lambda: "serves 3" in t.output(job), JOB_S)
    daemon = t.do.must("pgrep", "-f", "refitd serve").split()[-1]
    t.do.must("kill", "-KILL", daemon)
    state, output = t.await_end(job)
    holds = state == "FAILED 1:0" and bool(re.search("the daemon on n[123] ended with status 137", _said(output)))
    t.found.saw("a daemon dies: the job fails, with its name", f"{state}: {_said(output)}", holds)
    job = t.submit(3, "job_trainer.py n2,n3 100000")
    t.do.until(lambda: "serves 3" in t.output(job), JOB_S)
    t.do.must("scancel", job)
    state, _ = t.await_end(job)
    t.found.saw("`scancel` ends it", state, state.startswith("CANCELLED"))
    left = t.left()
    t.found.saw("after all of these, nothing is left on the nodes", left or "no process, no folder", not left)


def _said(output: str) -> str:
    return "; ".join(line for line in output.splitlines() if line.startswith("refit: "))


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # take the container down
    try:
        with Container(Path(arguments[0]) / "root", {PROGRAMS: "/programs"}) as container:
            t = Trial(container)
            slurm = t.begin()
            whole(t)
            ends(t)
    except NotAllowed as error:
        print(f"refitd: not run here: {error}", file=sys.stderr)
        return STATUS_NOT_ALLOWED
    return t.found.keep("slurm", "A job under a real Slurm", INTRO.format(slurm=slurm), "--json" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
