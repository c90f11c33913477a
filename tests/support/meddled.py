"""A copy service for tests: gloo, with received messages altered as the file in MEDDLES_FILE says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from refitd.copy_services.base import PACKED
from refitd.copy_services.registry import ENTRY_POINTS, Backend

VARIABLE = "MEDDLES_FILE"


def _join(epoch: Any) -> Any:
    from refitd.copy_services import gloo
    from tests.support.meddling import Between

    service: Any = gloo.join(epoch)
    between, run = Between(service), service.run

    def meddled(*args: Any, **kwargs: Any) -> Any:
        between.meddle(Path(os.environ[VARIABLE]).read_text())
        return run(*args, **kwargs)

    service.run = meddled
    return service


BACKEND = Backend("meddled", PACKED, lambda: "", join=_join)


def install(folder: Path) -> None:
    """Make a folder whose presence in PYTHONPATH installs the service."""
    info = folder / "meddled-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: meddled\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nmeddled = tests.support.meddled:BACKEND\n")
