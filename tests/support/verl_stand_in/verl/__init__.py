"""A stand-in for verl where it is not installed: the names that refitd's checkpoint engine takes from it, no more."""
