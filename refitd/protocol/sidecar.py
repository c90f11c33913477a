"""Messages between a daemon and its workers, and on the descriptor socket, each sent as one datagram."""

from __future__ import annotations

from refitd.protocol.base import Count, Label, Message, Name, Seconds, Secret, Small, Text, Value
from refitd.protocol.local import ArenaDescriptor, CommitDone, CommitFailed, Failure, FreeArena, Goodbye, Wrote
from refitd.protocol.shards import Shape

# --- daemon to worker -------------------------------------------------------------------------------------


class MapArena(Message, frozen=True):
    """Map the arena whose descriptor comes with this message."""

    arena: Count
    nbytes: Count
    write: bool
    device: Label = ""  # its GPU (refitd.buffers.cuda.name_of); "": main memory


class ExchangeArenas(Message, frozen=True):
    """Exchange the memory files of two arenas of one size: from now on each id means the other's file."""

    arena: Count
    other: Count


class JoinEpoch(Message, frozen=True):
    """Join an epoch at position `index` of `labels`, whose workers listen at `doors`. Reply: EpochJoined."""

    epoch: Name
    service: Name
    index: Small
    labels: tuple[Name, ...]
    address: Name
    staging_bytes: Count
    timeout_s: Seconds
    key: Secret
    device: Label = ""  # the GPU whose memory the service moves (refitd.buffers.cuda.name_of); "": main memory
    doors: tuple[Label, ...] = ()  # HOST:PORT
    lane: Small = 0
    hops: Small = 0  # see refitd.copy_services.Epoch; likewise
    peers: Small = 0


class LeaveEpoch(Message, frozen=True):
    """Leave an epoch that has ended; its jobs have been dropped."""

    epoch: Name


class WarmUp(Message, frozen=True):
    """Import a service's modules now, to form the next epoch faster."""

    service: Name


class LoadJob(Message, frozen=True):
    """Prepare the job in the memory file that comes with this message, `nbytes` long.

    Without an epoch the file has CopyList.to_bytes, or ConversionList.to_bytes if the job `converts`. With an epoch it
    has TransferList.to_bytes, and the job runs together with the peers' jobs.
    """

    job: Count
    nbytes: Count
    epoch: Name | None = None
    converts: bool = False


class HeldBase(Value, frozen=True):
    """`held_in` holds the base (an earlier version) of `arena`, which a job reads or writes.

    `version` identifies the base in the whole cluster. `held_in` may equal `arena` if the job writes it.
    """

    arena: Count
    held_in: Count
    version: Name


class Unwritten(Value, frozen=True):
    """The client of `member` still writes `version` into this arena; Wrote tells which bytes it has written."""

    arena: Count
    version: Count
    member: Name


class RunJob(Message, frozen=True):
    """Run a loaded job once. A job of an epoch must end within `timeout_s`, and may use `bases`.

    So must a job that reads `unwritten` arenas: it waits for the bytes that it copies.
    """

    job: Count
    run: Count
    verify: bool = True
    timeout_s: Seconds = 0.0
    bases: tuple[HeldBase, ...] = ()
    unwritten: tuple[Unwritten, ...] = ()


class DropBases(Message, frozen=True):
    """Stop comparing with a run's bases, because their memory is needed. The worker always answers with DropBases."""

    run: Count


class DropJob(Message, frozen=True):
    """Discard a job."""

    job: Count


class Span(Value, frozen=True):
    """Elements [first : first + count], row-major, of a tensor in an arena. Offset and strides in bytes."""

    arena: Count
    offset: Count
    shape: Shape
    strides: Shape
    element_size: Small
    first: Count
    count: Count


# --- worker to daemon -------------------------------------------------------------------------------------

# The exit status of a worker that could not allocate memory for an arena or a copy.
NO_MEMORY_STATUS = 71


class WorkerReady(Message, frozen=True):
    """The worker has started."""

    pid: Count
    services: tuple[Name, ...]


class EpochJoined(Message, frozen=True):
    """All workers of the epoch have joined; with a `reason`, this worker failed to join."""

    epoch: Name
    reason: Text = ""


class ReadSpans(Message, frozen=True):
    """Take the digest of each span (refitd.buffers.layout.digest), or compare it with one of `others`.

    Reply: SpansRead.
    """

    run: Count
    spans: tuple[Span, ...]
    others: tuple[Span, ...] = ()


class SpansRead(Message, frozen=True):
    """The digests in order, or per pair the first and last differing element and their number; or the error."""

    run: Count
    digests: bytes = b""
    found: tuple[tuple[Count, Count, Count], ...] = ()
    reason: Text = ""


class RunProgress(Message, frozen=True):
    """Bytes written so far in this run."""

    run: Count
    bytes_done: Count


class BaseWrong(Message, frozen=True):
    """This worker built wrong bytes from a base and a delta; one of them is wrong.

    The worker sends this before other workers learn of the failure, so the daemon can read it before any abort.
    """

    run: Count


class StepTimes(Value, frozen=True):
    """The steps of one kind in a run, in seconds before its end; they were busy for `busy_s`."""

    kind: Label
    began_s: Seconds
    ended_s: Seconds
    busy_s: Seconds


class RunDone(Message, frozen=True):
    """Every copy is written; with `verify`, each copy equals its source.

    With a `reason` the run has failed; `copy` is the index of the failed copy, if known.
    """

    run: Count
    copies: Count = 0
    bytes: Count = 0
    seconds: Seconds = 0.0
    staging_bytes: Count = 0  # in the worker's own buffers
    crossed_bytes: Count = 0  # received from other nodes
    delta_bytes: Count = 0  # received as deltas, counted at full size
    changed_bytes: Count = 0  # the changed bytes among `delta_bytes`
    paths: tuple[Label, ...] = ()  # by GPUs within the node: names of refitd.addressing.paths
    steps: tuple[StepTimes, ...] = ()  # between nodes
    reason: Text = ""
    copy: Count | None = None
    differs: bool = False  # written bytes differ from their source


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
    """The client hands over an arena from before its daemon's restart; its descriptor comes with this message.

    Reply: ArenaDescriptor. Until a registration uses the arena, it belongs to the client like one from CreateArena.
    """

    nbytes: Count


ToWorker = (
    MapArena
    | FreeArena
    | ExchangeArenas
    | LoadJob
    | RunJob
    | DropBases
    | DropJob
    | ReadSpans
    | JoinEpoch
    | LeaveEpoch
    | WarmUp
    | Wrote
)
FromWorker = WorkerReady | RunProgress | DropBases | BaseWrong | RunDone | SpansRead | EpochJoined
DescriptorRequest = FetchArena | GiveArena | Goodbye | CommitDone | CommitFailed  # local.Told, too
DescriptorReply = Greeting | ArenaDescriptor | Failure
