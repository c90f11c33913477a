"""Serves a process's metrics over HTTP, for Prometheus."""
