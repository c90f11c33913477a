"""Publish a checkpoint on disk as a version, and save the live version as a checkpoint."""
