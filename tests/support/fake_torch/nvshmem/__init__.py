"""A stand-in for nvshmem4py on the memory of fake_cuda.c, with NVSHMEM's rules; see `bindings`."""
