"""Persistent memory: arenas, their layout, and how descriptors are handed out."""
