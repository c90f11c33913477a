"""Imported by every Python that has this folder in PYTHONPATH, to install fake GPUs."""

import device_shim

device_shim.install()
