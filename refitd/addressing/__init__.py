"""Turns a plan into addressed copies for workers."""
