"""Malformed input, made from a seed: thrown at everything that reads what a peer or a user has written."""
