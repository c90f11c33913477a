"""Manifests in a few words, and the examples that come with the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from refitd.describe.metadata import ParameterMetadata
from refitd.errors import ConfigError
from refitd.files import parse
from refitd.offline.files import read
from refitd.offline.layouts import Layout, ModelSpec
from refitd.offline.rosters import place, side_rosters

LAYOUTS = Path(__file__).parents[2] / "configs" / "layouts"
EXAMPLES = sorted(LAYOUTS.glob("*.toml"))
MODELS = sorted((LAYOUTS / "models").glob("*.toml"))
SPLIT = {"name": "w", "shape": [8, 4], "split": {"dim": 0}, "stage": "every"}


def layout(*tensors: dict, layers: int = 0, experts: int = 0, **degrees) -> Layout:
    model = {"name": "m", "tensors": list(tensors), "layers": layers, "experts": experts}
    found = read({"kind": "layout", "name": "l", "model": model, **degrees}, "test")
    assert isinstance(found, Layout)
    return found


def held(found: Layout, index: int) -> dict[str, ParameterMetadata]:
    (placed,) = place([found])
    return {m.name: m for m in list(side_rosters(placed, "source"))[index].source}


def refused(values: dict | str, model: ModelSpec | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(parse(values, "test", is_json=False) if isinstance(values, str) else values, "test", model)
    return str(caught.value)
