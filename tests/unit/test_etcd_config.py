"""Settings of several coordinators and of a journal in etcd."""

from __future__ import annotations

from pathlib import Path

import pytest

from refitd.config import Config, EtcdPlace, load
from refitd.coordinator.main import run
from refitd.errors import ConfigError

KEY = {"security.key": "/k"}


def configured(**given: object) -> Config:
    return load(None, environ={}, **{key.replace("__", "."): value for key, value in given.items()}, **KEY)


@pytest.mark.parametrize(
    ("text", "members", "prefix"),
    [
        ("etcd://127.0.0.1:2379", [("127.0.0.1", 2379)], "/refitd"),
        ("etcd://localhost:2379/", [("localhost", 2379)], "/refitd"),
        ("etcd://[::1]:1,127.0.0.1:2/a/b-c.d/", [("::1", 1), ("127.0.0.1", 2)], "/a/b-c.d"),
        ("etcds://a:1,b.c:2,a:1/x", [("a", 1), ("b.c", 2)], "/x"),
    ],
)
def test_a_journal_in_etcd_is_members_and_a_prefix(text: str, members: list[tuple[str, int]], prefix: str) -> None:
    found = configured(coordinator__journal=text).journal_place
    assert found == EtcdPlace(tuple(members), prefix, text.startswith("etcds"))
    assert configured(coordinator__journal=str(found)).journal_place == found


@pytest.mark.parametrize(
    "text",
    [
        "etcd://",
        "etcd://a",
        "etcd://a:0",
        "etcd://a:70000",
        "etcd://a:1,",
        "etcd://a:1/b c",
        "etcd://a:1//b",
        "etcd://a:1/b?c",
        "etcd://user:pw@a:1/b",
        "etcds://" + ",".join(f"h{i}:1" for i in range(17)),
    ],
)
def test_another_form_is_refused_with_the_right_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not etcd://HOST:PORT,HOST:PORT/PREFIX"):
        configured(coordinator__journal=text)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"coordinator__journal": "http://a:1"}, "neither a file's path nor etcd://"),
        ({"coordinator__journal": "etcd://10.0.0.1:1"}, "without TLS: whoever is on the path could decide"),
        ({"coordinator__journal": "etcd://127.0.0.1:1,far:1"}, "reaches far without TLS"),
        ({"coordinator__journal": "etcd://127.0.0.1.evil:1"}, "without TLS"),
        ({"coordinator__journal": "etcd://127.0.0.1:1", "etcd__ca": "/x"}, "are for TLS; write etcds://"),
        ({"coordinator__journal": "etcds://a:1", "etcd__user": "u"}, "etcd.user needs etcd.password_file"),
        ({"coordinator__journal": "etcds://a:1", "etcd__key": "/x"}, "etcd.key needs etcd.cert"),
        ({"coordinator__endpoint": []}, "Expected `array` of length >= 1"),
        ({"coordinator__endpoint": ["tcp://a:1", "tcp://a:1"]}, "lists it twice|which it lists twice"),
        ({"coordinator__endpoint": ["tcp://a:1", "ipc:///x"]}, "all with tcp:// or all with ipc://"),
        ({"coordinator__endpoint": ["tcp://a:1", "b"]}, "'b' is neither ipc://PATH nor tcp://"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        configured(**given)


def test_daemons_list_coordinators_and_a_coordinator_does_not(tmp_path: Path) -> None:
    both = ["tcp://a:1", "tcp://b:2"]
    found = configured(coordinator__endpoint=both, node__runtime_dir=str(tmp_path))
    assert found.coordinator_endpoints == tuple(both) and found.coordinator_endpoint == "tcp://a:1, tcp://b:2"
    assert load(None, {"REFITD_COORDINATOR__ENDPOINT": str(both)}, **KEY).coordinator_endpoints == tuple(both)
    with pytest.raises(ConfigError, match="a coordinator listens at one endpoint, its own; the list is for daemons"):
        run(found)


def test_a_standalone_daemon_keeps_its_journal_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd.coordinator.main.die_with_parent", lambda: None)
    found = configured(coordinator__journal="etcd://127.0.0.1:1", node__runtime_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="leave --standalone out and run `refitd coordinator`"):
        run(found, with_parent=True)
