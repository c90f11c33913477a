"""The stub that trainers, engines and operators import. It loads torch only when tensors are registered."""

from refitd.client.client import Client, connect

__all__ = ["Client", "connect"]
