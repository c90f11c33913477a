"""Python starts with this on PYTHONPATH as if torch were not installed: importing it fails, and nothing finds it."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
