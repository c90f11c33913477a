"""Helpers for testing code that uses refitd: real daemons and clusters, a polling engine, an oracle for plans.

Only `refitd.testing.fixtures` imports pytest. torch is imported only once a tensor is registered.
"""

from refitd.testing.daemon import Cluster, Coordinator, Daemon
from refitd.testing.processes import Engine, Process, ProcessFailed, RunningSwap, eventually, stopped

__all__ = [
    "Cluster",
    "Coordinator",
    "Daemon",
    "Engine",
    "Process",
    "ProcessFailed",
    "RunningSwap",
    "eventually",
    "stopped",
]
