"""Publish a folder of safetensors files as a version, and save the live version as such a folder."""
