"""Imported by every Python that has this folder in PYTHONPATH: gives it GPUs that are none."""

import device_shim

device_shim.install()
