"""Imported by every Python that has this folder in PYTHONPATH, to install fake GPUs."""

import os

import device_shim

device_shim.is_late = os.environ.get("FAKE_CUDA_LATE") == "1"
device_shim.install()
