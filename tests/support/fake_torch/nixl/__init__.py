"""A stand-in for NIXL's Python interface on the memory of fake_cuda.c, with NIXL's rules; see `_api`."""
