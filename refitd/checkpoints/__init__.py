"""Checkpoints at both ends: a folder of safetensors files published as a version, the live version saved as one."""
