"""Messages between a daemon and its workers, and on the descriptor socket. They travel as single datagrams."""

from __future__ import annotations

from refitd.protocol.base import Count, Message, Name, Seconds, Text
from refitd.protocol.local import Failure

# --- daemon to worker -------------------------------------------------------------------------------------


class MapArena(Message, frozen=True):
    """Map the arena whose descriptor comes along."""

    arena: Count
    nbytes: Count
    write: bool


class UnmapArena(Message, frozen=True):
    """The arena will not be used again; jobs over it have been dropped."""

    arena: Count


class LoadJob(Message, frozen=True):
    """Prepare the copies in the memory file that comes along (CopyList.to_bytes, `nbytes` long)."""

    job: Count
    nbytes: Count


class RunJob(Message, frozen=True):
    """Perform a loaded job once."""

    job: Count
    run: Count
    verify: bool = True


class DropJob(Message, frozen=True):
    """Forget a job."""

    job: Count


# --- worker to daemon -------------------------------------------------------------------------------------


class WorkerReady(Message, frozen=True):
    """The worker has started."""

    pid: Count
    services: tuple[Name, ...]


class RunProgress(Message, frozen=True):
    """Bytes written so far in this run."""

    run: Count
    bytes_done: Count


class RunDone(Message, frozen=True):
    """Every copy is written; with `verify`, every digest of what was read equals that of what was written."""

    run: Count
    copies: Count
    bytes: Count
    seconds: Seconds


class RunFailed(Message, frozen=True):
    """The job was not performed; `copy` is the index of the copy it failed at, if one is known."""

    run: Count
    reason: Text
    copy: Count | None = None


# --- descriptor socket ------------------------------------------------------------------------------------


class Session(Message, frozen=True):
    """The daemon's greeting: the token for this connection's ZeroMQ session."""

    token: bytes
    endpoint: Name


class FetchArena(Message, frozen=True):
    """The client asks for an arena of its own."""

    arena: Count
    write: bool = False


class ArenaDescriptor(Message, frozen=True):
    """The descriptor comes along."""

    arena: Count
    nbytes: Count


ToWorker = MapArena | UnmapArena | LoadJob | RunJob | DropJob
FromWorker = WorkerReady | RunProgress | RunDone | RunFailed
DescriptorRequest = FetchArena
DescriptorReply = Session | ArenaDescriptor | Failure
