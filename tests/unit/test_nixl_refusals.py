"""Errors about a missing NIXL, another version, or too little memory for its workers."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from refitd.copy_services import Epoch, Mailbox, nixl
from refitd.copy_services.nixl_memory import LEAST_PART_BYTES, PARTS, part_bytes
from refitd.errors import ConfigError, TransportError


class Said(Mailbox):
    """Another worker has already said who it is."""

    def put(self, key: str, value: bytes) -> None:
        pass

    def get(self, key: str, timeout: float) -> bytes:
        return b'{"name": "other", "metadata": "AAAA"}'


EPOCH = Epoch("e", 0, ("worker 0 on a", "worker 0 on b"), "127.0.0.1", 1 << 20, Said(), 1.0, bytes(32))


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace NIXL with a fake; return the methods of its agent."""
    found: dict[str, Any] = {}
    library: Any = ModuleType("nixl._api")
    library.nixl_agent_config = lambda **_: None
    library.nixl_agent = lambda *_: SimpleNamespace(**found)
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", library)
    return found


def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match=r"NIXL cannot be loaded: .*; pip install 'refitd\[nixl\]'"):
        nixl.join(EPOCH)


def test_nixl_of_another_version_here(methods: dict[str, Any]) -> None:
    """There, `register_memory` may have another name."""
    methods["register"] = None
    with pytest.raises(TransportError, match=r"worker 0 on a: NIXL cannot start: .*register_memory"):
        nixl.join(EPOCH)


def test_nixl_of_another_version_there(methods: dict[str, Any]) -> None:
    def refuse(metadata: bytes) -> None:
        raise RuntimeError("NIXL_ERR_MISMATCH\nin detail")

    methods |= {"register_memory": lambda *_: 1, "get_agent_metadata": lambda: b"x", "add_remote_agent": refuse}
    said = "worker 0 on a cannot reach worker 0 on b: NIXL_ERR_MISMATCH; use one version of NIXL on all nodes"
    with pytest.raises(TransportError, match=said):
        nixl.join(EPOCH)


def test_more_workers_than_there_is_memory_for_are_refused_and_what_would_do_is_said() -> None:
    many = replace(EPOCH, labels=tuple(f"worker 0 on n{i}" for i in range(3000)), staging_bytes=32 << 20)
    with pytest.raises(ConfigError, match=r"3000 workers .* have 16777216; set it to at least") as failed:
        nixl.join(many)
    enough = int(str(failed.value).partition("at least ")[2].partition(",")[0])
    assert part_bytes(3000, enough // 2) == LEAST_PART_BYTES
    with pytest.raises(ConfigError):
        part_bytes(3000, enough // 2 - 1)


@pytest.mark.parametrize("size", [1, 2, 8, 130, 500, 1000])
def test_the_slab_stays_within_half_of_staging_bytes(size: int) -> None:
    assert 2 * PARTS * (size - 1) * part_bytes(size, 16 << 20) <= 16 << 20
