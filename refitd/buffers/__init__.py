"""Persistent memory: arenas, their layout, and the transfer of their descriptors."""
