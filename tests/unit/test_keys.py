"""Key files: secret keys are private, an invalid file is refused with the next step, and keygen makes valid ones."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from refitd.config import Config, CoordinatorConfig, SecurityConfig
from refitd.errors import ConfigError
from refitd.protocol import keys
from refitd.protocol.keys import ALL_ROLES, Allowed
from refitd.security import coordinator_keys, daemon_keys
from refitd_cli.control import main as refitctl
from tests.support.json_schema import check_printed


@pytest.fixture
def pair() -> keys.KeyPair:
    return keys.generate("n0")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_is_written_is_read_again_and_only_the_secret_is_private(tmp_path, pair):
    secret_path, public_path = keys.write(pair, tmp_path)
    assert (secret_path.name, mode(secret_path)) == ("n0.key", 0o600)
    assert (public_path.name, mode(public_path)) == ("n0.pub", 0o644)
    assert keys.read(secret_path) == pair
    assert keys.read_public(str(public_path)) == keys.read_public(pair.public) == pair.public
    assert pair.secret not in public_path.read_text()
    assert pair.public in repr(pair) and pair.secret not in repr(pair)


@pytest.mark.parametrize("existing", ["n0.key", "n0.pub"])
def test_existing_file_is_not_written_over_unless_asked(tmp_path, pair, existing):
    (tmp_path / existing).write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        keys.write(pair, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {existing: "mine"}
    keys.write(pair, tmp_path, replace=True)
    assert keys.read(tmp_path / "n0.key") == pair


@pytest.mark.parametrize("name", ["", "a b", "../n0", "a/b", "-n0", ".n0", "n0\n", "x" * 101, 'n"0'])
def test_name_that_is_no_file_name_is_refused(name):
    with pytest.raises(ConfigError, match="key name"):
        keys.generate(name)


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o644])
def test_key_file_that_others_can_read_is_refused_with_the_command_that_mends_it(tmp_path, pair, bits):
    path, _ = keys.write(pair, tmp_path)
    path.chmod(bits)
    with pytest.raises(ConfigError, match=rf"n0\.key: mode {bits:o} .*chmod 600 {path}"):
        keys.read(path)


def broken(pair: keys.KeyPair) -> dict[str, str]:
    other = keys.generate("other")
    return {
        "not toml": "name =",
        "no secret": f'name = "n0"\npublic = "{pair.public}"\n',
        "unknown key": f'name = "n0"\npublic = "{pair.public}"\nsecret = "{pair.secret}"\nmore = 1\n',
        "short": f'name = "n0"\npublic = "{pair.public}"\nsecret = "{pair.secret[:-1]}"\n',
        "beyond 32 bits": f'name = "n0"\npublic = "{pair.public}"\nsecret = "{"#" * 40}"\n',
        "of another": f'name = "n0"\npublic = "{other.public}"\nsecret = "{pair.secret}"\n',
        "not ascii": f'name = "ü"\npublic = "{pair.public}"\nsecret = "{pair.secret}"\n',
        "empty": "",
    }


@pytest.mark.parametrize("what", broken(keys.generate("x")))
def test_malformed_key_file_is_named_with_the_next_step_and_without_the_secret(tmp_path, pair, what):
    path = tmp_path / "n0.key"
    path.write_text(broken(pair)[what])
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"n0\.key: .*refitctl keygen") as caught:
        keys.read(path)
    assert pair.secret[:-1] not in str(caught.value)


def test_line_of_a_list_says_which_node_a_key_may_be_and_which_roles_its_clients_have(tmp_path, pair):
    other, third, fourth = (keys.generate(f"n{number}") for number in (1, 2, 3))
    listed = tmp_path / "allowed"
    listed.write_text(
        f"# the cluster\n\n{pair.public_line} node=n0 roles=engine,operator\n{other.public_line} node=gpu/7\n"
        f"  {third.public_line} roles=trainer  \n{fourth.public_line}\n{fourth.public_line}\n"
    )
    assert keys.read_list(listed) == {
        pair.public: Allowed("n0", "n0", frozenset({"engine", "operator"})),
        other.public: Allowed("n1", "gpu/7", ALL_ROLES),
        third.public: Allowed("n2", "", frozenset({"trainer"})),
        fourth.public: Allowed("n3"),
    }


LIMITS = ["roles=", "roles=root", "roles=engine,", "node=", "node=a node=b", "role=engine"]
NO_LINES = ["n0", "n0 short", "{key}", "n0 {key} more", "a/b {key}", "n0\u00a0{key}"]


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        *(
            (f"{{line}} {rest}\n", 0o600, r"line 1 is not `NAME KEY \[node=NAME\] \[roles=ROLE,...\]`")
            for rest in LIMITS
        ),
        *((f"{{line}}\n{other}\n", 0o600, r"allowed: (line 2|byte \d+) is not") for other in NO_LINES),
        ("{line} roles=engine\n{line}\n", 0o600, "line 2 says of a key what an earlier line does not"),
        ("# nobody\n", 0o644, "no key in it"),
        ("{line}", 0o664, "chmod go-w"),
    ],
)
def test_a_list_of_keys_that_is_wrong_is_refused_by_its_line(tmp_path, pair, text, mode, said):
    listed = tmp_path / "allowed"
    listed.write_text(text.format(line=pair.public_line, key=pair.public))
    listed.chmod(mode)
    with pytest.raises(ConfigError, match=said):
        keys.read_list(listed)


@pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, "é" * 40, "#" * 40])
def test_server_key_is_a_key_or_a_pub_file(text):
    with pytest.raises(ConfigError, match=r"neither a public key .* nor a \.pub file"):
        keys.read_public(text)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/refitd/" + "x" * 24 + ".pub",
        "/etc/refitd/cluster/coordinator-head.key",
        "./" + "x" * 38,
        "../keys/" + "x" * 32,
        "x" * 36 + ".key",
    ],
)
def test_path_with_the_form_of_a_key_is_a_path(path):
    assert keys.is_key(path)
    with pytest.raises(ConfigError, match=f"{Path(path)}: cannot be read"):
        keys.read_public(path)
    config = Config(
        coordinator=CoordinatorConfig(endpoint="tcp://h:1"), security=SecurityConfig(key=path, server_key="x" * 40)
    )
    with pytest.raises(ConfigError, match=f"{Path(path)}: cannot be read"):
        daemon_keys(config)


def test_other_text_with_the_form_of_a_key_is_a_key_also_with_a_slash_in_it(tmp_path, monkeypatch):
    text = "sub/dir/" + "x" * 32
    monkeypatch.chdir(tmp_path)
    assert keys.read_public(text) == text
    found = Config(
        coordinator=CoordinatorConfig(endpoint="tcp://h:1"), security=SecurityConfig(key=text, server_key="x" * 40)
    )
    with pytest.raises(ConfigError, match="holds a key, or no file has this name") as refused:
        daemon_keys(found)
    assert text not in str(refused.value)  # it may be a secret key
    (tmp_path / "sub/dir").mkdir(parents=True)
    (tmp_path / text).touch()
    with pytest.raises(ConfigError, match=f"{text}: no key in it"):
        keys.read_public(text)


# --- which keys a process uses ----------------------------------------------------------------------------


def config(endpoint: str, **security: object) -> Config:
    security = {name: str(value) for name, value in security.items()}
    return Config(coordinator=CoordinatorConfig(endpoint=endpoint), security=SecurityConfig(**security))


def test_each_side_gets_its_keys_from_the_configuration(tmp_path, pair):
    key, public = keys.write(pair, tmp_path)
    server = keys.generate("head")
    found = coordinator_keys(config("tcp://*:7433", key=key, allowed=public))
    assert found == keys.ServerKeys(pair, {pair.public: Allowed("n0")})
    assert daemon_keys(config("tcp://head:7433", key=key, server_key=server.public)) == keys.ClientKeys(
        pair, server.public
    )


@pytest.mark.parametrize(
    "endpoint", [f"tcp://{host}:7433" for host in ("10.1.2.3", "127.0.0.1", "0.0.0.0", "localhost")]
)
def test_coordinator_without_a_list_and_daemon_without_a_server_key_are_refused(tmp_path, pair, endpoint):
    key, public = keys.write(pair, tmp_path)
    with pytest.raises(ConfigError, match=r"security\.allowed is not set.*refitctl keygen"):
        coordinator_keys(config(endpoint, key=key, server_key=public))
    with pytest.raises(ConfigError, match=r"security\.server_key is not set.*refitctl keygen"):
        daemon_keys(config(endpoint, key=key, allowed=public))
    for keys_of in (coordinator_keys, daemon_keys):
        with pytest.raises(ConfigError, match=r"security\.\w+ is not set"):
            keys_of(config(endpoint))


@pytest.mark.parametrize("endpoint", ["", "ipc:///run/refitd/coordinator.sock"])
def test_local_endpoint_needs_no_keys(endpoint):
    assert coordinator_keys(config(endpoint)) is None
    assert daemon_keys(config(endpoint)) is None


# --- refitctl keygen --------------------------------------------------------------------------------------


def keygen(*arguments: object):
    words = ("keygen", *map(str, arguments))
    result = CliRunner().invoke(refitctl, words)
    if "--json" in words:
        check_printed(words, result.stdout)
    return result


def test_keygen_writes_both_files_and_says_what_goes_where(tmp_path):
    result = keygen("n0", "--directory", tmp_path)
    assert result.exit_code == 0, result.output
    pair = keys.read(tmp_path / "n0.key")
    assert mode(tmp_path / "n0.key") == 0o600
    assert pair.public_line in result.stdout and pair.secret not in result.stdout
    blocks = re.findall(r"^ +\[security\]\n(?: +\w+ = .*\n)+", result.stdout, re.MULTILINE)
    for block, expected in zip(blocks, ({"key", "server_key"}, {"key", "allowed"}), strict=True):
        section = tomllib.loads(block)["security"]
        assert section.keys() == expected
        assert section["key"] == str(tmp_path / "n0.key")


def test_keygen_prints_one_object_for_programs(tmp_path):
    found = json.loads(keygen("n0", "--directory", tmp_path, "--json").stdout)
    pair = keys.read(Path(found["key_file"]))
    assert found == {
        "name": "n0",
        "public": pair.public,
        "key_file": str(tmp_path / "n0.key"),
        "public_file": str(tmp_path / "n0.pub"),
    }


def test_keygen_keeps_an_existing_key_unless_told_to_replace_it(tmp_path):
    keygen("n0", "--directory", tmp_path)
    first = keys.read(tmp_path / "n0.key")
    refused = keygen("n0", "--directory", tmp_path)
    assert (refused.exit_code, keys.read(tmp_path / "n0.key")) == (2, first)
    assert "--replace" in refused.stderr
    assert keygen("n0", "--directory", tmp_path, "--replace").exit_code == 0
    assert keys.read(tmp_path / "n0.key") != first


def test_keygen_makes_the_last_directory_and_no_others(tmp_path):
    assert keygen("n0", "--directory", tmp_path / "refitd").exit_code == 0
    assert keys.read(tmp_path / "refitd" / "n0.key").name == "n0"
    refused = keygen("n0", "--directory", tmp_path / "none" / "none", "--json")
    assert refused.exit_code == 2
    assert "cannot be written: No such file" in json.loads(refused.stdout)["error"]["message"]
