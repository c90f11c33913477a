"""Malformed input, made from a seed, for all readers of input from peers and users."""
