"""See `verl` beside this."""
