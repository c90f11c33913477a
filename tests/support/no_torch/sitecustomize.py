"""With this folder on PYTHONPATH, Python behaves as if torch were not installed: importing it fails, finding it too."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
