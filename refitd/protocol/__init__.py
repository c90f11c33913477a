"""Typed messages, their codec and the sockets they travel on."""
