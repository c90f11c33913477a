"""refitd: move new weights from a sharded trainer into sharded inference engines.

Exported names (see `__init__.pyi`) are loaded on first use: `import refitd` alone imports neither torch nor zmq.
"""

import lazy_loader

__version__ = "0.1.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    from refitd.errors import needing_torch

    with needing_torch(f"refitd.{name}"):
        return _load(name)
