"""refitd: new weights from a sharded trainer into sharded inference engines.

Names are loaded when they are used: `import refitd` alone imports neither torch nor zmq. `__init__.pyi` lists them.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
