"""The examples that only configure a framework name what refitd has, and settings that it knows."""

from __future__ import annotations

import importlib.util
import pkgutil
from pathlib import Path

import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_nemo_rls_example_names_the_transport_and_settings_that_it_knows() -> None:
    generation = yaml.safe_load((EXAMPLES / "nemo_rl_grpo.yaml").read_text())["policy"]["generation"]
    transport = pkgutil.resolve_name(generation["refit_transport"])
    (settings,) = generation["refit_cfg"].values()
    assert [*generation["refit_cfg"]] == [generation["refit_transport"]]
    transport(1 << 20, **settings)


def test_verls_example_names_the_adapter() -> None:
    text = (EXAMPLES / "verl_grpo.sh").read_text()
    (module,) = [line.partition("=")[2].split()[0] for line in text.splitlines() if "custom_backend_module" in line]
    assert importlib.util.find_spec(module) is not None
