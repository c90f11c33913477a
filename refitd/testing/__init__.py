"""Helpers for testing code that uses refitd: real daemons and clusters, a polling engine, an oracle for plans.

Only `refitd.testing.fixtures` imports pytest. torch is imported only once a tensor is registered.
"""

from refitd.testing.daemon import Cluster, Coordinator, Daemon
from refitd.testing.members import Engine, RunningSwap
from refitd.testing.processes import Process, ProcessFailed, eventually, stopped

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
