"""The manifests of configs/kubernetes: all names in them resolve, and refitd accepts their configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from refitd.config import Config, load
from refitd.protocol import keys
from tests.support.kubernetes import FOLDER, objects

ROOT = FOLDER.parents[1]
MADE = {"nodes.key", "coordinator.key"}


OBJECTS = objects()
DATA = OBJECTS["ConfigMap", "refitd-config"]["data"]
PODS = [name for name in OBJECTS if name[0] in ("DaemonSet", "StatefulSet")]


def pod(name: tuple[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = OBJECTS[name]["spec"]["template"]
    return found


def containers(name: tuple[str, str]) -> Iterator[dict[str, Any]]:
    yield from pod(name)["spec"]["containers"]
    yield from pod(name)["spec"]["initContainers"]


def config(name: str, folder: Path, **environ: str) -> Config:
    (folder / name).write_text(DATA[name])
    return load(folder / name, environ)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.30", "1.32", "1.34"])
def test_the_api_s_schemas_take_every_object(version: str) -> None:
    """Run only if kubernetes-validate is installed, because it contains the schemas."""
    schemas = pytest.importorskip("kubernetes_validate")
    for one in objects().values():
        schemas.validate(one, version, strict=True)


def test_all_is_in_one_namespace() -> None:
    assert {one["metadata"].get("namespace", "refitd") for one in OBJECTS.values()} == {"refitd"}


@pytest.mark.parametrize("name", PODS, ids="/".join)
def test_volumes_mounts_labels_and_ports_agree(name: tuple[str, str]) -> None:
    template, spec = pod(name), OBJECTS[name]["spec"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    claimed = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
    mounted = {mount["name"] for one in containers(name) for mount in one["volumeMounts"]}
    assert mounted == {*volumes} | claimed
    assert spec["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert volumes["config"]["configMap"]["name"] == "refitd-config"
    secret = volumes["secret"]["secret"]
    assert {item["key"] for item in secret["items"]} < {*OBJECTS["Secret", secret["secretName"]]["stringData"]}
    for one in containers(name):
        ports = {port["name"] for port in one.get("ports", ())}
        probes = {one[probe]["httpGet"]["port"] for probe in one if probe.endswith("Probe")}
        paths = {one[probe]["httpGet"]["path"] for probe in one if probe.endswith("Probe")}
        assert probes <= ports and paths <= {"/healthz", "/readyz"}


def test_services_and_policies_select_pods_and_their_ports() -> None:
    labels = {name: pod(name)["metadata"]["labels"] for name in PODS}
    ports = {
        tuple(labels[name].items()): {port["name"] for one in containers(name) for port in one.get("ports", ())}
        for name in PODS
    }
    service = OBJECTS["Service", "refitd-coordinator"]["spec"]
    assert {port["targetPort"] for port in service["ports"]} <= ports[tuple(service["selector"].items())]
    for policy in (one for (kind, _), one in OBJECTS.items() if kind == "NetworkPolicy"):
        there = ports[tuple(policy["spec"]["podSelector"]["matchLabels"].items())]
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule.get("ports", ())} <= there
            sources = [one["podSelector"]["matchLabels"] for one in rule["from"] if "podSelector" in one]
            assert all(source in labels.values() for source in sources)


def test_the_configuration_is_taken_and_means_these_ports_paths_and_files(tmp_path: Path) -> None:
    daemon, coordinator = ("DaemonSet", "refitd"), ("StatefulSet", "refitd-coordinator")
    node = config("node.toml", tmp_path, REFITD_NODE__NAME="gpu-7", REFITD_NODE__ADDRESS="10.1.2.3")
    head = config("coordinator.toml", tmp_path)
    service = OBJECTS["Service", "refitd-coordinator"]
    host, port = f"{service['metadata']['name']}.refitd.svc", service["spec"]["ports"][0]["port"]
    assert node.coordinator_endpoint == f"tcp://{host}:{port}"
    for name, found, metrics in ((daemon, node, 9464), (coordinator, head, 9465)):
        (main,) = pod(name)["spec"]["containers"]
        numbers = {one["name"]: one["containerPort"] for one in main["ports"]}
        assert found.metrics.address == ("0.0.0.0", metrics) and numbers["metrics"] == metrics
        mounts = [Path(mount["mountPath"]) for mount in main["volumeMounts"]]
        used = [found.runtime_dir, Path(found.security.key)]
        used += [found.journal_place] if name == coordinator else []
        assert all(any(mount in (path, *path.parents) for mount in mounts) for path in used)
        assert main["command"][-1].startswith("/etc/refitd/") and Path(main["command"][-1]).name in DATA
        assert {Path(found.security.server_key or found.security.allowed).name} < {*DATA}
        assert Path(found.security.key).name in MADE
        variables = {one["name"] for one in main.get("env", ())}
        assert all(re.fullmatch(r"REFITD_[A-Z]+__[A-Z]+", variable) for variable in variables)
    assert {one["name"] for one in pod(daemon)["spec"]["containers"][0]["env"]} == {
        "REFITD_NODE__NAME",
        "REFITD_NODE__ADDRESS",
    }
    numbers = {one["name"]: one["containerPort"] for one in pod(coordinator)["spec"]["containers"][0]["ports"]}
    assert head.coordinator_endpoint.endswith(f":{numbers['messages']}")
    limit = pod(daemon)["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert node.node.max_arena_bytes < int(limit.removesuffix("Gi")) << 30


def test_users_image_and_keys_are_those_of_the_image_and_of_keygen(tmp_path: Path) -> None:
    image = (ROOT / "Dockerfile").read_text()
    user = int(re.search(r"useradd --system --uid (\d+)", image).group(1))  # type: ignore[union-attr]
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)  # type: ignore[union-attr]
    named = {"DaemonSet": "refitd", "StatefulSet": "refitd-control"}
    for name in PODS:
        assert {one["image"] for one in containers(name)} == {f"{named[name[0]]}:{version}"}
        security = pod(name)["spec"]["securityContext"]
        (main,) = pod(name)["spec"]["containers"]
        assert {**security, **main["securityContext"]}["runAsUser"] == security["fsGroup"] == user
    # file names and list entries match the output of keygen
    for name in ("nodes", "coordinator"):
        keys.write(keys.generate(name), tmp_path)
        assert f"{name}.key" in OBJECTS["Secret", "refitd-keys"]["stringData"]
    assert [found.name for found in keys.read_list(tmp_path / "nodes.pub").values()] == ["nodes"]
    assert DATA["allowed"].strip() == "REPLACE with nodes.pub", "no real key is in the repository"
