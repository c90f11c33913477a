"""The requirements and results of checks of scripts/gpu-check."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
CHECKS_FILE = str(Path(__file__).with_name("checks.py"))  # a check starts it for its other processes
STAND_INS = Path(__file__).with_name("stand_ins")


class Skip(Exception):
    """A check cannot run here; the text has the reason and the remedy."""


@dataclass
class Outcome:
    """The result of a check that did not raise."""

    figures: dict[str, object] = field(default_factory=dict)
    why: str = ""
    state: str = "passed"


def need(**packages: str) -> None:
    """Raise Skip unless these modules (name=package) are installed; stand-ins do not count."""
    missing = [package for module, package in packages.items() if not _is_installed(module)]
    if missing:
        raise Skip(
            f"needs {', '.join(missing)}: `pip install {' '.join(missing)}`, or carry a folder of wheels "
            "(scripts/gpu-check --help)"
        )


def _is_installed(module: str) -> bool:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    return found is not None and (found.origin is None or STAND_INS not in Path(found.origin).parents)


def need_daemon() -> None:
    """Raise Skip unless daemons can run."""
    need(
        zmq="pyzmq",
        msgspec="msgspec",
        lazy_loader="lazy_loader",
        xxhash="xxhash",
        cryptography="cryptography",
        click="click",
        rich="rich",
        prometheus_client="prometheus-client",
    )
