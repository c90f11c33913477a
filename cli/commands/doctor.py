"""`refitctl doctor`: checks of this machine and its daemon. They only read, and import neither torch nor transports."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import resource
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from refitd.buffers import capacity, cuda
from refitd.config import default_runtime_dir
from refitd.copy_services import Capabilities, registry
from refitd.copy_services.registry import OWN, Offer
from refitd.daemon.workers import SYSFS, Gpu, cards, lanes_of, visible_gpus
from refitd.errors import ConfigError, RefitdError
from refitd_cli.group import EXIT_FAILED
from refitd_cli.output import print_table, size
from refitd_cli.session import Session, asks
from refitd_cli.view import problem_lines

if TYPE_CHECKING:
    from refitd.client import Client

# Descriptors a daemon may need: one per arena, one more for each worker it goes to, two per client.
WANTED_DESCRIPTORS = 4096

# Wheels that install the same files: the later one overwrites the earlier one's.
RIVALS = (
    ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    ("nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"),
    ("nvshmem4py-cu12", "nvshmem4py-cu13"),
)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `state`: "ok", "warn" (works, but slower) or "fail" (refitd cannot work)."""

    name: str
    state: str
    found: str
    advice: str = ""


def all_findings(session: Session) -> Iterator[CheckResult]:
    """Run every check, cheapest first."""
    yield python()
    yield torch()
    yield sealed_memory()
    yield memory(_read("/proc/meminfo"), _limits())
    yield huge_pages(_read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"), _read("/proc/meminfo"))
    yield descriptors()
    yield gpu_arenas()
    yield from peer_access(gpus := visible_gpus())
    yield network_cards(gpus, SYSFS)
    yield from backends()
    yield from wheels()
    yield runtime_dir(Path(session.address) if session.address else default_runtime_dir())
    yield daemon(session.connect)


def python() -> CheckResult:
    """Check the Python interpreter."""
    return CheckResult(
        "python", "ok", f"{platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} CPUs"
    )


def torch() -> CheckResult:
    """Check torch by its metadata: importing it takes seconds."""
    found = _version("torch")
    if found is None:
        return CheckResult(
            "torch",
            "warn",
            "not installed",
            "a coordinator and refitctl need none; for daemons, trainers and engines: `pip install 'refitd[torch]'`",
        )
    return CheckResult("torch", "ok", found)


def sealed_memory() -> CheckResult:
    """Check that memfds can be sealed against shrinking."""
    name = "sealed memfd"
    try:
        descriptor = os.memfd_create("refitd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        return CheckResult(
            name,
            "fail",
            f"memfd_create: {exc.strerror}",
            "refitd needs Linux 3.17 and a seccomp profile with memfd",
        )
    try:
        os.ftruncate(descriptor, 4096)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        try:
            os.ftruncate(descriptor, 0)
        except PermissionError:
            return CheckResult(name, "ok", "created, sealed, cannot be truncated")
        return CheckResult(name, "fail", "the seal did not hold", "a peer could truncate an arena; use another kernel")
    except OSError as exc:
        return CheckResult(
            name, "fail", f"sealing: {exc.strerror}", "allow fcntl(F_ADD_SEALS) in the sandbox this runs in"
        )
    finally:
        os.close(descriptor)


def memory(meminfo: str, limits: Sequence[capacity.Limit] = ()) -> CheckResult:
    """Check how much memory arenas could take, within control groups and this process's own limits."""
    fields = _meminfo(meminfo)
    if "MemAvailable" not in fields:
        return CheckResult("memory", "warn", "unknown", "no MemAvailable in /proc/meminfo")
    free = fields["MemAvailable"]
    found = f"{size(free)} of {size(fields.get('MemTotal', 0))} available"
    for limit in limits:
        if not limit.name.startswith("MemAvailable"):
            free = min(free, limit.left)
            found += f", {size(limit.left)} left under {limit.name}"
    if free < 1 << 30:
        return CheckResult("memory", "warn", found, "arenas hold each source shard twice and each target shard once")
    return CheckResult("memory", "ok", found)


def huge_pages(shmem_enabled: str, meminfo: str) -> CheckResult:
    """Check for huge pages; without them first use and copies are slower."""
    pool = _meminfo(meminfo).get("HugePages_Total", 0)
    mode = shmem_enabled.partition("[")[2].partition("]")[0] or "unknown"
    found = f"pool of {pool} pages, shmem_enabled={mode}"
    if pool or mode in ("always", "within_size", "advise", "force"):
        return CheckResult("huge pages", "ok", found)
    advice = "4 KiB pages work; larger ones are faster: write advise to transparent_hugepage/shmem_enabled"
    return CheckResult("huge pages", "warn", found, advice)


def descriptors() -> CheckResult:
    """Check how many files a daemon started here may open; it raises its soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{hard} (soft limit {soft})"
    if hard != resource.RLIM_INFINITY and hard < WANTED_DESCRIPTORS:
        return CheckResult(
            "open files",
            "warn",
            found,
            f"ulimit -Hn {WANTED_DESCRIPTORS}, for nodes with many models or clients",
        )
    return CheckResult("open files", "ok", found)


def gpu_arenas(survey: Callable[[], list[tuple[str, str]]] = cuda.survey) -> CheckResult:
    """Check which GPUs can hold arenas."""
    name = "GPU arenas"
    found = survey()
    if not found:
        return CheckResult(name, "ok", "no GPU is visible: arenas are in main memory")
    text = ", ".join(gpu for gpu, _ in found)
    problems = [problem for _, problem in found if problem]
    if problems:
        advice = f"register with device='cpu': {'; '.join(problems)}"
        return CheckResult(name, "warn", f"not on all of {text}", advice)
    return CheckResult(name, "ok", text)


def peer_access(gpus: Sequence[Gpu]) -> Iterator[CheckResult]:
    """Check that GPUs can address each other's memory; yields no result for fewer than two."""
    name, pairs = "GPU to GPU", [(one, gpu) for one in gpus for gpu in range(len(gpus)) if gpus[gpu] is not one]
    apart = [f"{one.name} -> {gpus[gpu].name}" for one, gpu in pairs if gpu not in one.reaches]
    if apart:
        more = f" and {len(apart) - 3} more" if len(apart) > 3 else ""
        advice = "copies between them pass through pinned main memory: check `nvidia-smi topo -p2p r`, IOMMU and ACS"
        yield CheckResult(name, "warn", f"no peer access: {', '.join(apart[:3])}{more}", advice)
    elif pairs:
        yield CheckResult(name, "ok", f"all {len(gpus)} GPUs can address each other's memory")


def network_cards(gpus: Sequence[Gpu], sysfs: Path) -> CheckResult:
    """Check which network card is closest to each GPU. The configuration may choose others: see `refitctl status`."""
    name, there = "network cards", cards(sysfs)
    if not there:
        return CheckResult(name, "ok", "none but virtual ones: the libraries choose among these")
    lanes = lanes_of(gpus, len(gpus), {}, sysfs)
    found = [
        f"{gpu.name} (NUMA node {_or_unknown(lane.numa)}): {lane.card}" for gpu, lane in zip(gpus, lanes, strict=True)
    ]
    listed = ", ".join(f"{card.name} (NUMA node {_or_unknown(card.spot.numa)})" for card in there)
    return CheckResult(name, "ok", "; ".join([f"{len(there)}: {listed}", *found]))


def _or_unknown(numa: int | None) -> str:
    return "unknown" if numa is None else str(numa)


def backends(offers: Callable[[], Iterable[Offer]] = registry.offers) -> Iterator[CheckResult]:
    """Check each copy service: its abilities, and its missing dependencies."""
    packages: dict[str, str] = {}
    for offer in offers():
        name = f"backend {offer.name}"
        try:
            backend = offer.load()
            name = f"backend {backend.name}"
            if backend.name in packages:
                raise ConfigError(f"packages {packages[backend.name]} and {offer.package} both have one of this name")
            packages[backend.name] = offer.package
            missing = backend.missing()
        except Exception as exc:  # a foreign package may raise anything
            found = str(exc) if isinstance(exc, ConfigError) else f"package {offer.package}: {exc!r}"
            # the daemon and its workers load every backend
            yield CheckResult(name, "fail", found, f"no daemon starts with it: mend or uninstall {offer.package}")
        else:
            origin = "" if offer.package == OWN else f", from package {offer.package}"
            yield CheckResult(name, "warn" if missing else "ok", _does(backend.capabilities) + origin, missing)


def wheels() -> Iterator[CheckResult]:
    """Check for packages that must not be installed together; yields no result without any."""
    for rivals in RIVALS:
        found = [f"{name} {version}" for name in rivals if (version := _version(name)) is not None]
        if len(found) > 1:
            advice = "their wheels overwrite each other's files: uninstall the one torch does not use"
            yield CheckResult("wheels", "warn", " and ".join(found), advice)


def runtime_dir(path: Path) -> CheckResult:
    """Check that the runtime directory belongs to its user alone."""
    name = "runtime directory"
    try:
        found = path.stat()
    except OSError as exc:
        return CheckResult(name, "warn", f"{path}: {exc.strerror}", "the daemon creates it")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o026:
        return CheckResult(name, "fail", f"{path}: mode {mode:04o}", f"others may enter it: chmod 0700 {path}")
    if mode & 0o077:
        advice = f"others may enter it; where node.allowed_uids lets nobody in: chmod 0700 {path}"
        return CheckResult(name, "warn", f"{path}: mode {mode:04o}", advice)
    return CheckResult(name, "ok", f"{path}: mode {mode:04o}, uid {found.st_uid}")


def daemon(connect: Callable[[], Client]) -> CheckResult:
    """Check that a daemon answers, and a coordinator behind it."""
    try:
        client = connect()
        try:
            report = client.status()
        finally:
            client.close()
    except RefitdError as exc:
        return CheckResult("daemon", "fail", str(exc))
    nodes = ", ".join(f"{node.node} (pid {node.pid}, {len(node.workers)} workers)" for node in report.nodes)
    found = f"answers; coordinator pid {report.coordinator_pid}; nodes: {nodes or 'none'}"
    for node in report.nodes:
        if node.host == socket.gethostname() and (used := [lane.card or "none" for lane in node.lanes]):
            found += f"; network cards of the workers of {node.node}: {', '.join(used)}"
    problems = [*problem_lines(report)]
    return CheckResult("daemon", "warn" if problems else "ok", found, "; ".join(problems))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _limits() -> list[capacity.Limit]:
    try:
        return [*capacity.memory_limits(), *capacity.process_limits()]
    except (RefitdError, OSError):
        return []  # `memory` says that the kernel does not tell


def _meminfo(text: str) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; counts, which have no unit, are unchanged."""
    fields = {}
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[key] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return fields


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _does(capabilities: Capabilities) -> str:
    ends = "one-sided" if capabilities.is_one_sided else "two-sided"
    reach = "between nodes" if capabilities.crosses_nodes else "within a node"
    return f"{ends}, {reach}, {' and '.join(sorted(capabilities.devices))}"


class DoctorFound(msgspec.Struct, frozen=True):
    """The results of all checks; `healthy` if no check fails."""

    healthy: bool
    checks: tuple[CheckResult, ...]


@click.command()
@asks
def doctor(session: Session) -> int:
    """Check this machine and the daemon on it. Exit 1 if something keeps refitd from working."""
    findings = tuple(all_findings(session))
    healthy = all(finding.state != "fail" for finding in findings)
    rows = ((finding.name, finding.state, finding.found, finding.advice) for finding in findings)
    columns = ("check", "state", "found", "what to do")
    session.show(DoctorFound(healthy, findings), lambda _: print_table("", columns, rows))
    return 0 if healthy else EXIT_FAILED
