"""See the package `verl` above."""
