"""Workers whose received messages are altered as the file in MEDDLES_FILE says.

The folder that `install` makes is put in PYTHONPATH. Its `sitecustomize` runs at the start of every process and wraps
`tcp.join` once a worker imports it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

VARIABLE = "MEDDLES_FILE"
WATCHED = "refitd.copy_services.tcp"

_SITECUSTOMIZE = f"""
import importlib.util, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name != "{WATCHED}":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            from tests.support import meddled
            meddled.wrap(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Watch())
"""


def wrap(tcp: Any) -> None:
    """Alter what the services of this process receive."""
    join = tcp.join

    def joined(epoch: Any) -> Any:
        from refitd.testing.conformance.services import Between

        service: Any = join(epoch)
        between, run = Between(service), service.run

        def meddled(*args: Any, **kwargs: Any) -> Any:
            between.meddle(Path(os.environ[VARIABLE]).read_text())
            return run(*args, **kwargs)

        service.run = meddled
        return service

    tcp.join = joined


def install(folder: Path) -> None:
    """Make a folder whose presence in PYTHONPATH wraps tcp."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
