"""Messages between a daemon and its workers, and on the descriptor socket. They travel as single datagrams."""

from __future__ import annotations

from refitd.protocol.base import Count, Label, Message, Name, Seconds, Secret, Small, Text, Value
from refitd.protocol.local import CommitDone, CommitFailed, CommitQuiet, Failure, Paused
from refitd.protocol.shards import Shape

# --- daemon to worker -------------------------------------------------------------------------------------


class MapArena(Message, frozen=True):
    """Map the arena whose descriptor comes with this message."""

    arena: Count
    nbytes: Count
    write: bool
    device: Label = ""  # its GPU (refitd.buffers.cuda.name_of); "": main memory


class UnmapArena(Message, frozen=True):
    """Unmap an arena; the jobs that used it have been dropped."""

    arena: Count


class ExchangeArenas(Message, frozen=True):
    """Exchange what two arenas of one size hold: from now on each id means the other's memory file."""

    arena: Count
    other: Count


class JoinEpoch(Message, frozen=True):
    """Join an epoch at position `index` of `labels`; reply EpochJoined or EpochFailed."""

    epoch: Name
    service: Name
    index: Small
    labels: tuple[Name, ...]
    address: Name
    staging_bytes: Count
    timeout_s: Seconds
    key: Secret


class LaneValue(Message, frozen=True):
    """A value from another worker of the epoch."""

    epoch: Name
    key: Name
    value: bytes


class LeaveEpoch(Message, frozen=True):
    """Leave an epoch that has ended; its jobs have been dropped."""

    epoch: Name


class WarmUp(Message, frozen=True):
    """Import a service's modules now, so that the next epoch forms faster."""

    service: Name


class LoadJob(Message, frozen=True):
    """Prepare the job in the memory file that comes with this message, `nbytes` long.

    Without an epoch it is CopyList.to_bytes, or ConversionList.to_bytes if it `converts`. With one it is
    TransferList.to_bytes, and runs together with the peers' jobs.
    """

    job: Count
    nbytes: Count
    epoch: Name | None = None
    converts: bool = False


class HeldBase(Value, frozen=True):
    """What a job reads or writes in `arena` lies in arena `held_in` as it was in an earlier version.

    `version` identifies that version in the whole cluster. `held_in` may be `arena`, where a job writes.
    """

    arena: Count
    held_in: Count
    version: Name


class TimeCable(Message, frozen=True):
    """Send to, or receive from, the worker at position `peer` of an epoch for so long. Reply: CableTimed."""

    run: Count
    epoch: Name
    peer: Small
    sends: bool
    seconds: Seconds


class RunJob(Message, frozen=True):
    """Run a loaded job once; a job of an epoch must end within `timeout_s`, and may use `bases`."""

    job: Count
    run: Count
    verify: bool = True
    timeout_s: Seconds = 0.0
    bases: tuple[HeldBase, ...] = ()


class DropBases(Message, frozen=True):
    """Compare nothing with a run's bases any more: somebody waits for their memory. Reply: BasesDropped, always."""

    run: Count


class DropJob(Message, frozen=True):
    """Discard a job."""

    job: Count


class Span(Value, frozen=True):
    """Elements [first : first + count], row-major, of a tensor in an arena. Offset and strides in bytes.

    With a `pid` there is no arena: `offset` is an address in that process.
    """

    arena: Count
    offset: Count
    shape: Shape
    strides: Shape
    element_size: Small
    first: Count
    count: Count
    pid: Count = 0


class TakeDigests(Message, frozen=True):
    """Take the digest of each span (refitd.buffers.blocks.digest). Reply: DigestsTaken."""

    run: Count
    spans: tuple[Span, ...]


class CompareSpans(Message, frozen=True):
    """Compare pairs of spans. Reply: SpansCompared."""

    run: Count
    pairs: tuple[tuple[Span, Span], ...]


# --- worker to daemon -------------------------------------------------------------------------------------

# The exit status of a worker that got no memory for an arena or a copy.
NO_MEMORY_STATUS = 71


class WorkerReady(Message, frozen=True):
    """The worker has started."""

    pid: Count
    services: tuple[Name, ...]


class LanePut(Message, frozen=True):
    """This worker's value for its peers in an epoch."""

    epoch: Name
    key: Name
    value: bytes


class EpochJoined(Message, frozen=True):
    """All workers of the epoch have joined."""

    epoch: Name


class EpochFailed(Message, frozen=True):
    """This worker could not join."""

    epoch: Name
    reason: Text


class RunProgress(Message, frozen=True):
    """Bytes written so far in this run."""

    run: Count
    bytes_done: Count


class BasesDropped(Message, frozen=True):
    """What this run sends is no longer compared with anything: the rest of it goes whole."""

    run: Count


class BaseWrong(Message, frozen=True):
    """This worker built wrong bytes from a base and a delta: one of the two is wrong. No other worker knows yet that
    the run fails, so the daemon can read this before any order to abort.
    """

    run: Count


class RunDone(Message, frozen=True):
    """Every copy is written; with `verify`, each was compared with its source and is equal."""

    run: Count
    copies: Count
    bytes: Count
    seconds: Seconds
    staging_bytes: Count = 0  # held in the worker's own buffers
    crossed_bytes: Count = 0  # that came from other nodes
    delta_bytes: Count = 0  # that came as deltas, counted whole
    changed_bytes: Count = 0  # of these, what had changed


class CableTimed(Message, frozen=True):
    """The bytes received for a TimeCable, between two times of this host's monotonic clock, or why it failed."""

    run: Count
    bytes: Count = 0
    began_s: Seconds = 0.0
    ended_s: Seconds = 0.0
    reason: Text = ""


class RunFailed(Message, frozen=True):
    """The job failed; `copy` is the index of the failed copy, if known."""

    run: Count
    reason: Text
    copy: Count | None = None
    differs: bool = False  # what was written differs from its source


class DigestsTaken(Message, frozen=True):
    """The digests in order, or the reason if they could not be taken."""

    run: Count
    digests: bytes = b""
    reason: Text = ""


class SpansCompared(Message, frozen=True):
    """Per pair, the first and last differing element and how many differ; or the reason if that is unknown."""

    run: Count
    found: tuple[tuple[Count, Count, Count], ...] = ()
    reason: Text = ""


# --- descriptor socket ------------------------------------------------------------------------------------


class Greeting(Message, frozen=True):
    """The daemon's greeting: the token for this connection's ZeroMQ session."""

    token: bytes
    endpoint: Name


class FetchArena(Message, frozen=True):
    """The client requests the descriptor of one of its arenas."""

    arena: Count
    write: bool = False


class GiveArena(Message, frozen=True):
    """The client gives an arena back that it has kept while its daemon was restarted; its descriptor comes with this.

    Reply: ArenaGiven. The arena is the client's own, as one made by CreateArena, until a registration takes it over.
    """

    nbytes: Count


class ArenaGiven(Message, frozen=True):
    """The daemon has taken an arena back, under this number."""

    arena: Count


class Goodbye(Message, frozen=True):
    """The client closes its session regularly: nothing is retained for a successor."""


class ArenaDescriptor(Message, frozen=True):
    """The reply to FetchArena; the descriptor comes with it."""

    arena: Count
    nbytes: Count
    device: Label = ""  # its GPU; "": main memory


ToWorker = (
    MapArena
    | UnmapArena
    | ExchangeArenas
    | LoadJob
    | RunJob
    | DropBases
    | DropJob
    | TakeDigests
    | CompareSpans
    | JoinEpoch
    | LaneValue
    | LeaveEpoch
    | TimeCable
    | WarmUp
)
FromWorker = (
    WorkerReady
    | RunProgress
    | BasesDropped
    | BaseWrong
    | RunDone
    | CableTimed
    | RunFailed
    | DigestsTaken
    | SpansCompared
    | LanePut
    | EpochJoined
    | EpochFailed
)
DescriptorRequest = (
    FetchArena | GiveArena | Goodbye | Paused | CommitQuiet | CommitDone | CommitFailed
)  # local.Told, too
DescriptorReply = Greeting | ArenaDescriptor | ArenaGiven | Failure
