"""Configuration: the examples load, mistakes are named, and flag > environment > file > default."""

from __future__ import annotations

import configparser
import itertools
import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from refitd.config import Config, EtcdPlace, ModelConfig, default_runtime_dir, load
from refitd.coordinator.main import run
from refitd.daemon.coordinator import reachable_address
from refitd.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLES = sorted([*CONFIGS.glob("*.toml"), *CONFIGS.glob("cluster/*.toml")])


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "refitd.toml"
        path.write_text(text)
        return path

    return write


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


def test_there_are_examples_for_a_laptop_a_node_a_coordinator_and_two_nodes():
    names = ["cluster/coordinator", "cluster/node-a", "cluster/node-b", "coordinator", "laptop", "node"]
    assert [name_of(path) for path in EXAMPLES] == names


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_example_loads(path):
    assert isinstance(load(path, environ={}), Config)


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_example_explains_every_key_it_sets(path):
    lines = path.read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if re.match(r"\w+ = ", line):
            assert above.startswith("# "), f"{path.name}: no comment above {line!r}"


def test_laptop_example_has_every_key():
    text = (CONFIGS / "laptop.toml").read_text()
    config = load(CONFIGS / "laptop.toml", environ={})
    sections = {field.name: getattr(config, field.name) for field in msgspec.structs.fields(Config)}
    for name, section in sections.items():
        struct = next(iter(section.values())) if name == "models" else section
        table = text.partition(f"\n[{name}")[2].partition("\n[")[0]
        for field in msgspec.structs.fields(struct):
            assert re.search(rf"^{field.name} = ", table, re.MULTILINE), f"[{name}] lacks {field.name}"


def test_laptop_example_holds_the_defaults_it_claims():
    found = load(CONFIGS / "laptop.toml", environ={})
    default = Config()
    assert found.deadlines == default.deadlines
    assert found.coordinator == default.coordinator
    assert found.log == default.log
    changed = {"name": "", "max_arena_bytes": default.node.max_arena_bytes}
    assert msgspec.structs.replace(found.node, **changed) == default.node


def test_node_and_coordinator_examples_meet_at_one_endpoint():
    node, coordinator = (load(CONFIGS / f"{name}.toml", environ={}) for name in ("node", "coordinator"))
    assert node.coordinator_endpoint == coordinator.coordinator_endpoint


def test_two_node_examples_meet_at_one_port_with_a_key_for_each():
    head, a, b = (load(CONFIGS / f"cluster/{name}.toml", environ={}) for name in ("coordinator", "node-a", "node-b"))
    assert len({config.coordinator_endpoint.rpartition(":")[2] for config in (head, a, b)}) == 1
    assert a.coordinator_endpoint == b.coordinator_endpoint
    assert len({config.security.key for config in (head, a, b)}) == 3
    assert Path(a.security.server_key) == Path(b.security.server_key) == Path(head.security.key).with_suffix(".pub")
    assert head.security.allowed and head.uses_keys and a.uses_keys


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("refitd", ["serve", "--standalone", "--config", "/etc/refitd/node.toml"]),
        ("refitd-coordinator", ["coordinator", "--config", "/etc/refitd/coordinator.toml"]),
    ],
)
def test_service_unit_runs_a_command_that_exists(name, expected):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(CONFIGS / f"{name}.service")
    program, *arguments = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "refitd"
    assert arguments == expected
    assert (CONFIGS / Path(arguments[-1]).name).is_file()
    assert unit["Service"]["RuntimeDirectoryMode"] == "0700"
    assert (unit["Service"]["Type"], unit["Service"]["RestartPreventExitStatus"]) == ("notify", "2")
    assert unit["Unit"]["After"] == unit["Unit"]["Wants"] == "network-online.target"


def test_slurm_example_refuses_to_start_without_commands():
    script = CONFIGS / "slurm-launch.sh"
    subprocess.run(["bash", "-n", script], check=True)
    environ = {"PATH": os.environ["PATH"], "TRAINER": ""}
    ended = subprocess.run(["bash", script], env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "TRAINER" in ended.stderr


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[node]\nwrokers = 2\n", "wrokers"),
        ("[nodes]\nworkers = 2\n", "nodes"),
        ("[models.policy]\nauto = true\n", "auto"),
        ("[node]\nworkers = 0\n", "workers"),
        ('[node]\nworkers = "2"\n', "workers"),
        ("[node]\nallowed_uids = [-1]\n", "allowed_uids"),
        ("[deadlines]\nstage_s = 0\n", "stage_s"),
        ('[log]\nlevel = "loud"\n', "level"),
        ("[node\n", "not TOML"),
        ("node = 3\n", "node"),
    ],
)
def test_mistake_is_named_with_the_file(write, text, named):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load(path, environ={})
    assert named in str(caught.value)
    assert str(path) in str(caught.value)


def test_environment_stands_above_the_file_and_a_flag_above_both(write):
    text = "[node]\nworkers = 3\nkeep_targets_s = 3\n[deadlines]\nplan_s = 3\n"
    path = write(f'{text}[security]\nkey = "/a.key"\nserver_key = "/a.pub"\n')
    environ = {"REFITD_NODE__WORKERS": "4", "REFITD_DEADLINES__PLAN_S": "4.5", "HOME": "/"}
    environ["REFITD_SECURITY__KEY"] = "/b.key"
    config = load(path, environ=environ, **{"node.workers": 5, "log.level": None})
    assert (config.node.workers, config.deadlines.plan_s, config.node.keep_targets_s) == (5, 4.5, 3)
    assert (config.log.level, config.security.key, config.security.server_key) == ("info", "/b.key", "/a.pub")


def test_environment_can_set_words_lists_and_models(write):
    environ = {
        "REFITD_NODE__RUNTIME_DIR": "/run/elsewhere",
        "REFITD_NODE__ALLOWED_UIDS": "[7, 8]",
        "REFITD_MODELS": '{ "Qwen/Qwen3-8B" = { auto_swap = true } }',
    }
    config = load(write('[models."Qwen/Qwen3-8B"]\nauto_swap = false\nverify = false\n'), environ=environ)
    assert str(config.runtime_dir) == "/run/elsewhere"
    assert config.node.allowed_uids == (7, 8)
    assert config.models["Qwen/Qwen3-8B"] == ModelConfig(auto_swap=True, verify=False)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("REFITD_NODE__WROKERS", "2", "`wrokers`.*did you mean `workers`"),
        ("REFITD_NOD__WORKERS", "2", "`nod`.*did you mean `node`"),
        ("REFITD_NODE__WORKERS", '"many"', r"node\.workers: expected a whole number, found a text"),
        ("REFITD_NODE__ALLOWED_UIDS", "[-1]", r"allowed_uids\[0\]"),
        ("REFITD_MODELS", "{m = {auto_swop = true}}", "`auto_swop`.*did you mean `auto_swap`"),
        ("REFITD_MODELS__POLICY__AUTO_SWAP", "true", "set REFITD_MODELS="),
        ("REFITD_RUNTIMEDIR", "/x", "did you mean REFITD_NODE__RUNTIME_DIR"),
        ("REFITD_NODE_WORKERS", "2", r"did you mean REFITD_NODE__WORKERS\?"),
        ("REFITD_WORKERS", "2", r"did you mean REFITD_NODE__WORKERS\?"),
        ("REFITD_ENDPOINT", "x", r"did you mean REFITD_COORDINATOR__ENDPOINT or REFITD_METRICS__ENDPOINT\?"),
        ("REFIT_NODE__WORKERS", "2", r"did you mean REFITD_NODE__WORKERS\?"),
        ("refitd_node__workers", "2", r"did you mean REFITD_NODE__WORKERS\?"),
        ("REFITD_LOG_LEVL", "debug", r"did you mean REFITD_LOG__LEVEL\?"),
    ],
)
def test_a_variable_that_is_wrong_is_named_with_its_key(variable, text, said):
    with pytest.raises(ConfigError, match=f"^{variable}: .*{said}"):
        load(None, environ={variable: text, "REFITD_NODE__NAME": "n0"})


def test_variables_of_kubernetes_and_of_our_scripts_are_ignored():
    names = "PORT SERVICE_HOST SERVICE_PORT_HTTP COORDINATOR_PORT COORDINATOR_PORT_5555_TCP_ADDR METRICS_SERVICE_HOST"
    names += " METRICS_PORT VENV TORCH CONFIG RUNTIME_DIR DAEMON_UID"
    assert load(None, environ={f"REFITD_{name}": "1" for name in names.split()}) == Config()


OVER_TCP = (
    "tcp://127.0.0.1:5555",
    "tcp://127.1.2.3:5555",
    "tcp://[::1]:5",
    "tcp://localhost:5",
    "tcp://0.0.0.0:5555",
    "tcp://10.1.2.3:5555",
    "tcp://*:5555",
    "tcp://127.example.com:5555",
    "tcp://[::]:5555",
)


@pytest.mark.parametrize("endpoint", OVER_TCP)
def test_no_tcp_endpoint_without_a_key_not_even_on_loopback(endpoint):
    commands = r"security\.key is not set.*`refitctl keygen HEAD`.*`refitctl keygen NODE`.*ipc://PATH"
    with pytest.raises(ConfigError, match=commands):
        load(None, environ={}, **{"coordinator.endpoint": endpoint})
    with_key = load(None, environ={}, **{"coordinator.endpoint": endpoint, "security.key": "/k"})
    assert with_key.uses_keys


@pytest.mark.parametrize("text", ["5#" + "a" * 38, "plain" * 8, "{}[]()<>" * 5, "#" * 40, "1#2"])
def test_key_in_the_environment_is_taken_as_it_is(text):
    assert load(None, environ={"REFITD_SECURITY__SERVER_KEY": text}).security.server_key == text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        *(
            ({"coordinator.endpoint": endpoint, "security.key": "/k"}, "neither ipc://PATH nor tcp://HOST:PORT")
            for endpoint in ("udp://127.0.0.1:1", "127.0.0.1:5555", "inproc://x")
        ),
        *(
            ({"coordinator.endpoint": f"tcp://{place}", "security.key": "/k"}, "is not tcp://HOST:PORT")
            for place in ("head", "head:port", "head:0", "head:99999", "a b:1", "127.0.0.1:0;10.1.2.3:1")
        ),
        # half a security section is not taken for none
        *(
            ({"coordinator.endpoint": "tcp://127.0.0.1:5555", f"security.{key}": "/k"}, r"security\.key")
            for key in ("server_key", "allowed")
        ),
    ],
)
def test_an_endpoint_that_is_none_or_lacks_its_key_is_refused(flags: dict[str, str], said: str):
    with pytest.raises(ConfigError, match=said):
        load(None, environ={}, **flags)


@pytest.mark.parametrize("environ", [{}, {"REFITD_VENV": "/somewhere", "REFITD_RUNTIME_DIR": "/elsewhere"}])
def test_without_a_file_and_variables_of_its_own_all_is_as_by_default(environ):
    assert load(None, environ=environ) == Config()
    assert not load(None, environ={}, **{"security.key": "/k", "security.allowed": "/a"}).uses_keys, "ipc needs none"


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"REFITD_RUNTIME_DIR": "/a", "XDG_RUNTIME_DIR": "/b"}, "/a"),
        ({"XDG_RUNTIME_DIR": "/b"}, "/b/refitd"),
        ({}, f"/tmp/refitd-{os.getuid()}"),
    ],
)
def test_default_runtime_dir_follows_the_environment(environ, path):
    assert default_runtime_dir(environ) == Path(path)


def test_a_coordinator_at_what_is_no_host_s_name_cannot_be_reached():
    elsewhere = load(None, environ={}, **{"coordinator.endpoint": "tcp://a..b:7433", "security.key": "k"})
    with pytest.raises(ConfigError, match="no address of this node leads there"):
        reachable_address(elsewhere)


def test_runtime_dir_that_no_socket_path_can_hold_is_refused():
    longest = "/" + "x" * 82
    assert load(None, environ={}, **{"node.runtime_dir": longest}).node.runtime_dir == longest
    with pytest.raises(ConfigError, match="too long"):
        load(None, environ={}, **{"node.runtime_dir": longest + "x"})


# --- Settings of several coordinators and of a journal in etcd. -----------------------------------------


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
        ({"coordinator__journal": "etcd://10.0.0.1:1"}, "without TLS: a host on the path could decide"),
        ({"coordinator__journal": "etcd://127.0.0.1:1,far:1"}, "reaches far without TLS"),
        ({"coordinator__journal": "etcd://127.0.0.1.evil:1"}, "without TLS"),
        ({"coordinator__journal": "etcd://127.0.0.1:1", "etcd__ca": "/x"}, "are for TLS; write etcds://"),
        ({"coordinator__journal": "etcds://a:1", "etcd__user": "u"}, "etcd.user needs etcd.password_file"),
        ({"coordinator__journal": "etcds://a:1", "etcd__key": "/x"}, "etcd.key needs etcd.cert"),
        ({"coordinator__endpoint": []}, "coordinator.endpoint: expected a list with a length >= 1"),
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


def test_a_misspelt_name_of_the_daemons_directory_is_refused_also_by_clients() -> None:
    for variable in ("REFITD_RUNTIMEDIR", "REFIT_RUNTIME_DIR", "REFITD_RUNTIME_DIRECTORY", "REFITD_DAEMON_ID"):
        with pytest.raises(ConfigError, match=f"{variable}: .* did you mean REFITD_(RUNTIME_DIR|DAEMON_UID)"):
            default_runtime_dir({variable: "/x"})
    fine = {
        "REFITD_DAEMON_UID": "3",
        "REFITD_NODE__RUNTIME_DIR": "/y",
        "REFITD_BENCH_RECORD": "1",
        "XDG_RUNTIME_DIR": "/z",
    }
    assert default_runtime_dir(fine) == Path("/z/refitd")
