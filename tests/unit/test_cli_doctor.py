"""Measurements and advice of refitctl doctor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from refitd.buffers import capacity
from refitd.copy_services import Backend, Capabilities, registry
from refitd.copy_services.registry import Offer
from refitd.errors import ConfigError, TransportError
from refitd_cli.commands import doctor as checks
from tests.support.cli import FakeClient, run


def test_doctor_without_a_daemon_fails_and_says_what_to_do():
    ran = run(TransportError("no daemon runs; start one"), "doctor", "--json")
    (daemon,) = [check for check in ran.object["checks"] if check["name"] == "daemon"]
    assert (ran.status, ran.object["healthy"], daemon["state"]) == (1, False, "fail")
    assert "start one" in daemon["found"]


def test_doctor_reaches_the_daemon(tmp_path):
    tmp_path.chmod(0o700)
    ran = run(FakeClient(), "doctor", "--json", "--address", str(tmp_path))
    (daemon,) = [check for check in ran.object["checks"] if check["name"] == "daemon"]
    assert daemon["state"] == "ok"
    assert "n0 (pid 2, 2 workers)" in daemon["found"]
    assert run(FakeClient(), "doctor", "--address", str(tmp_path)).status == ran.status


def test_runtime_directory_open_to_others_is_a_failure(tmp_path):
    tmp_path.chmod(0o755)
    assert checks.runtime_dir(tmp_path).state == "fail"
    tmp_path.chmod(0o700)
    assert checks.runtime_dir(tmp_path).state == "ok"
    assert checks.runtime_dir(tmp_path / "none").state == "warn"


@pytest.mark.parametrize(
    ("shmem", "pool", "state"),
    [
        ("always within_size advise [never] deny force", 0, "warn"),
        ("always [advise] never", 0, "ok"),
        ("", 8, "ok"),
        ("", 0, "warn"),
    ],
)
def test_huge_pages_come_from_a_pool_or_from_shmem(shmem, pool, state):
    assert checks.huge_pages(shmem, f"HugePages_Total:  {pool}\n").state == state


def test_little_memory_is_a_warning():
    assert checks.memory("MemTotal: 8000000 kB\nMemAvailable: 900000 kB\n").state == "warn"


def test_the_tightest_limit_counts_as_memory():
    limits = [
        capacity.Limit("memory.max of control group /job", 700_000_000, ""),
        capacity.Limit("RLIMIT_AS", 1 << 40, ""),
    ]
    found = checks.memory("MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n", limits)
    assert found.state == "warn"
    assert "700 MB left under memory.max of control group /job" in found.found


def offer(name: str, missing: Callable[[], str] = lambda: "", package: str = "refitd", **capabilities) -> Offer:
    backend = Backend(name, Capabilities(**{"is_one_sided": False, "crosses_nodes": True} | capabilities), missing)
    return Offer(name, package, lambda: backend)


def test_doctor_says_what_each_backend_does_and_what_it_lacks():
    def found() -> Iterator[Offer]:
        yield offer("shm", is_one_sided=True, crosses_nodes=False)
        yield offer(
            "gloo", lambda: "torch is not installed; `pip install 'refitd[torch]'` brings it", devices={"cuda", "cpu"}
        )
        yield offer("quic", package="refitd-quic")

    assert [(f.name, f.state, f.found, f.advice) for f in checks.backends(found)] == [
        ("backend shm", "ok", "one-sided, within a node, cpu", ""),
        (
            "backend gloo",
            "warn",
            "two-sided, between nodes, cpu and cuda",
            "torch is not installed; `pip install 'refitd[torch]'` brings it",
        ),
        ("backend quic", "ok", "two-sided, between nodes, cpu, from package refitd-quic", ""),
    ]


def test_doctor_names_the_package_of_a_backend_that_cannot_be_used():
    def broken() -> Backend:
        raise ConfigError("copy service 'quic' of package refitd-quic cannot be loaded: no libquic.so")

    def confused() -> str:
        raise ValueError("oops")

    def found() -> Iterator[Offer]:
        yield offer("shm")
        yield Offer("quic", "refitd-quic", broken)
        yield offer("rdma", confused, package="refitd-rdma")
        yield offer("shm", package="refitd-shm")

    own, *others = checks.backends(found)
    assert own.state == "ok"
    for finding, package in zip(others, ("refitd-quic", "refitd-rdma", "refitd-shm"), strict=True):
        assert finding.state == "fail"
        assert package in finding.found
        assert f"uninstall {package}" in finding.advice


def test_doctor_lists_exactly_what_the_daemon_would_load():
    assert [f.name for f in checks.backends()] == [f"backend {backend.name}" for backend in registry.installed()]


def test_doctor_loads_backends_of_other_packages(tmp_path, monkeypatch):
    info = tmp_path / "refitd_quic-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: refitd-quic\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[refitd.copy_services]\nquic = refitd_quic_is_not_there:BACKEND\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = [finding for finding in checks.backends() if finding.name == "backend quic"]
    assert finding.state == "fail"
    assert "package refitd-quic cannot be loaded: No module named 'refitd_quic_is_not_there'" in finding.found
    with pytest.raises(ConfigError, match="refitd-quic"):
        list(registry.installed())
