"""The registry: backends by name, their missing dependencies, and backends of other packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from refitd.copy_services import Backend, Capabilities
from refitd.copy_services.registry import ENTRY_POINTS, Registry, installed
from refitd.errors import ConfigError

ANY = Capabilities(is_one_sided=True, crosses_nodes=False)

MODULE = """
from refitd.copy_services import Capabilities
from refitd.copy_services import Backend

BACKEND = Backend("pigeon", Capabilities(is_one_sided=False, crosses_nodes=True), lambda: "")

def make():
    return Backend("carrier", BACKEND.capabilities, lambda: "no pigeons; `apt install pigeons` brings some")

def fails():
    raise OSError("libpigeon.so: cannot open")

BIRD = 7
GLOO = Backend("gloo", BACKEND.capabilities, lambda: "")
"""


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a package with these lines as its entry points."""

    def install(lines: str) -> None:
        (tmp_path / "pigeon_post.py").write_text(MODULE)
        info = tmp_path / "pigeon_post-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon-post\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{lines}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_an_unknown_name_is_told_with_those_that_there_are() -> None:
    registry = Registry([Backend("b", ANY, lambda: ""), Backend("a", ANY, lambda: "")])
    with pytest.raises(ConfigError, match="unknown copy service 'c'; known are a, b"):
        registry.find("c")


def test_a_service_that_lacks_something_says_what_and_how_to_get_it() -> None:
    registry = Registry([Backend("a", ANY, lambda: "no card; buy one")])
    with pytest.raises(ConfigError, match="copy service 'a' cannot run here: no card; buy one"):
        registry.find("a")
    assert [backend.name for backend in registry] == ["a"], "it is listed all the same"


def test_two_services_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two copy services are named 'a'"):
        Registry([Backend("a", ANY, lambda: ""), Backend("a", ANY, lambda: "")])


def test_each_registry_is_its_own() -> None:
    assert installed() is not installed()
    with pytest.raises(ConfigError):
        Registry([]).find("shm")


def test_refitds_own_services_are_found_or_say_what_they_lack() -> None:
    registry = installed()
    assert {"shm", "gloo", "nccl", "nvshmem", "cuda"} <= {backend.name for backend in registry}
    for backend in registry:
        assert backend.mapped or backend.over_group or backend.join
        if missing := backend.missing():
            with pytest.raises(ConfigError) as caught:
                registry.find(backend.name)
            assert missing in str(caught.value)
        else:
            assert registry.find(backend.name) is backend
    assert registry.find("shm").capabilities.is_one_sided
    assert not registry.find("gloo").capabilities.is_one_sided


@pytest.mark.parametrize(("line", "name"), [("x = pigeon_post:BACKEND", "pigeon"), ("x = pigeon_post:make", "carrier")])
def test_a_service_of_another_package_is_found(offer: Callable[[str], None], line: str, name: str) -> None:
    offer(line)
    registry = installed()

    assert name in {backend.name for backend in registry}
    if name == "pigeon":
        assert registry.find("pigeon").capabilities.crosses_nodes
    else:
        with pytest.raises(ConfigError, match="apt install pigeons"):
            registry.find("carrier")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("post = pigeon_post:fails", "libpigeon.so: cannot open"),
        ("post = pigeon_post:absent", "absent"),
        ("post = no_such_module:x", "No module named 'no_such_module'"),
        ("post = pigeon_post:BIRD", "is no Backend but 7"),
    ],
)
def test_a_package_whose_service_cannot_be_loaded_is_named(offer: Callable[[str], None], line: str, why: str) -> None:
    offer(line)
    with pytest.raises(ConfigError) as caught:
        list(installed())

    assert "copy service 'post' of package pigeon-post" in str(caught.value) and why in str(caught.value)


def test_a_package_that_takes_the_name_of_another_service_is_refused(offer: Callable[[str], None]) -> None:
    offer("x = pigeon_post:GLOO")
    with pytest.raises(ConfigError, match="two copy services are named 'gloo'"):
        list(installed())
