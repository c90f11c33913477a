"""The client library of trainers, engines and operators. It loads torch only when tensors are registered."""

from refitd.client.client import Client, connect

__all__ = ["Client", "connect"]
