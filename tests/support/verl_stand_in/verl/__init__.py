"""A stand-in for verl where it is not installed, with only the names that refitd's checkpoint engine imports."""
