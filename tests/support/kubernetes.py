"""The manifests of configs/kubernetes, read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "configs" / "kubernetes"


def objects() -> dict[tuple[str, str], dict[str, Any]]:
    """{(kind, name): object} of all manifests that are applied."""
    (listed,) = yaml.safe_load_all((FOLDER / "kustomization.yaml").read_text())
    assert {*listed["resources"]} == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    found = [one for name in listed["resources"] for one in yaml.safe_load_all((FOLDER / name).read_text())]
    assert len({(one["kind"], one["metadata"]["name"]) for one in found}) == len(found)
    return {(one["kind"], one["metadata"]["name"]): one for one in found}
