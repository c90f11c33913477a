"""Workers whose received messages are altered as the file in MEDDLES_FILE says.

SITE is put in PYTHONPATH. Its `sitecustomize` runs at the start of every process and wraps
`gloo.join` once a worker imports it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

VARIABLE = "MEDDLES_FILE"
SITE = Path(__file__).with_name("meddled_site")


def wrap(gloo: Any) -> None:
    """Alter what the services of this process receive."""
    join = gloo.join

    def joined(epoch: Any) -> Any:
        from refitd.testing.conformance.services import Between

        service: Any = join(epoch)
        between, run = Between(service), service.run

        def meddled(*args: Any, **kwargs: Any) -> Any:
            between.meddle(Path(os.environ[VARIABLE]).read_text())
            return run(*args, **kwargs)

        service.run = meddled
        return service

    gloo.join = joined
