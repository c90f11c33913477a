"""For tests of what uses refitd: a real daemon or cluster, an engine that polls, and an oracle that knows no planner.

Nothing here imports pytest but `refitd.testing.fixtures`, nor torch before a tensor is registered.
"""

from refitd.testing.cluster import Cluster
from refitd.testing.daemon import Coordinator, Daemon
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
