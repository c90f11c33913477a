"""Connect other frameworks, using only the public names of `refitd`."""
