"""Conversions between a source's elements and a destination's."""
