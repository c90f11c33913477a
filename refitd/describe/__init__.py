"""Describe local tensors as tiles of canonical tensors. Imports no sockets, and torch only when called."""
