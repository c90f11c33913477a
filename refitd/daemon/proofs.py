"""The digests of versions, and whether live tensors still match them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import xxhash

from refitd.buffers.blocks import DIGEST_BYTES, block_step, blocks_of, slice_text
from refitd.buffers.layout import row_major_strides
from refitd.daemon.actions import Instruction, Log, ToClient, ToCoordinator, ToWorker
from refitd.daemon.held import held_of
from refitd.daemon.members import Member, Proof
from refitd.dtypes import ELEMENT_SIZES
from refitd.execute.copies import LocalTensor
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import clipped
from refitd.protocol.held import HeldTensor
from refitd.protocol.local import RegisterTarget
from refitd.protocol.reports import Difference

# A swap that begins waits for one of these per worker at most: some 10 ms.
RUN_BYTES = 64 << 20
# numbers in one run's message, which is a datagram
RUN_NUMBERS = 2048
# differences that are located and listed for each rank
MAX_DIFFERENCES = 16
# how often work is begun again after a worker has died of something, or a version was taken over meanwhile
ATTEMPTS = 4
# checks asked for that may be under way
MAX_ASKED = 64


@dataclass(frozen=True, slots=True)
class _Block:
    tensor: int
    first: int
    count: int


class _Layout:
    """The blocks of a member's held tensors, in the order of their digests."""

    def __init__(self, member: Member) -> None:
        self.held: tuple[HeldTensor, ...] = held_of(member.registration)
        self.steps = tuple(block_step(prod(t.shape), ELEMENT_SIZES[t.dtype]) for t in self.held)
        self.blocks = [
            _Block(i, first, count)
            for i, (tensor, step) in enumerate(zip(self.held, self.steps, strict=True))
            for first, count in blocks_of(prod(tensor.shape), step)
        ]
        self.nbytes = sum(prod(t.shape) * ELEMENT_SIZES[t.dtype] for t in self.held)

    def span(self, places: tuple[LocalTensor, ...] | list[LocalTensor], block: _Block) -> sidecar.Span:
        """Return where a block lies, the tensors being at these places."""
        place, element = places[block.tensor], ELEMENT_SIZES[self.held[block.tensor].dtype]
        shape, strides = place.shape, place.strides
        if strides == row_major_strides(shape, element):
            shape, strides = (prod(shape),), (element,)  # fewer numbers
        return sidecar.Span(place.arena, place.offset, shape, strides, element, block.first, block.count)

    def difference(self, block: _Block, found: tuple[int, int, int] | None) -> Difference:
        """Return how people are told of a block that differs; `found` are its first, last and number of elements."""
        tensor = self.held[block.tensor]
        first, last, number = found if found is not None else (0, 0, 0)
        if not number:
            first, last = block.first, block.first + block.count - 1
        text = slice_text(tensor.shape, first, last)
        return Difference(tensor.name, tensor.shape, first, last, text, number)


@dataclass(slots=True)
class _Work:
    """Spans that workers digest, or (with `others`) compare, a batch at a time."""

    member: str
    what: Literal["stored", "live", "compare"]
    version: int
    spans: list[sidecar.Span]
    others: list[sidecar.Span]
    left: list[range]  # batches that no worker has
    is_urgent: bool
    home: int | None = None  # the worker of the GPU that they lie on
    is_due: bool = False  # a tick has passed since it came up
    results: dict[int, bytes | tuple[int, int, int]] = field(default_factory=dict)  # by span
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class _Run:
    """A batch that a worker has."""

    work: _Work
    batch: range
    worker: int


@dataclass(slots=True)
class _Asked:
    """What the coordinator has asked for, until it is answered."""

    check: str
    deadline: float
    timeout_s: float
    left: set[str]
    found: list[cluster.MemberChecked] = field(default_factory=list)


@dataclass(slots=True)
class _Check:
    """One member's check. Who asks while it is under way waits for another one that begins after it."""

    member: str
    number: int
    version: int
    asked: list[_Asked]
    later: list[_Asked] = field(default_factory=list)
    phase: Literal["stored", "live", "compare"] = "stored"
    differing: list[_Block] = field(default_factory=list)
    attempts: int = 1


class Proofs:
    """Takes the digests of committed versions in the background, and checks what is live when asked.

    Digests are taken of what the staging arena holds, which was compared with the sources as it was written, or of
    tensors that were written in place, at once. Workers do that, and read live tensors in arenas; a process's own are
    read by its client. Instructions go to `out`.
    """

    def __init__(
        self,
        node: str,
        workers: int,
        members: dict[str, Member],
        out: Callable[[Instruction], None],
        need: Callable[[int, set[int]], None],
        homes: Callable[[set[int]], dict[int, int]],
        is_swapping: Callable[[], bool],
    ) -> None:
        self._node = node
        self._workers = workers
        self._members = members
        self._out = out
        self._need = need
        self._homes = homes
        self._is_swapping = is_swapping
        self._work: list[_Work] = []
        self._runs: dict[int, _Run] = {}
        self._checks: dict[str, _Check] = {}
        self._asked: list[_Asked] = []
        self._numbers = 0

    # --- what happens to members --------------------------------------------------------------------------

    def committed(self, member: Member) -> None:
        """The member has taken over what its staging arena holds: take its digests once there is time."""
        member.proof = None
        self._drop_work(member.id)
        if member.verifies:
            # what was written in place is the engine's from now on: the sooner the better
            self._take_stored(member, is_urgent=member.in_place)
        check = self._checks.get(member.id)
        if check is not None and (member.live or check.phase != "live"):
            self._again(check)  # of tensors that the client reads it says itself that they have changed

    def left(self, member: Member, reason: str) -> None:
        """A member is gone."""
        self._drop_work(member.id)
        check = self._checks.pop(member.id, None)
        if check is not None:
            for asked in [*check.asked, *check.later]:
                self._tell(asked, cluster.MemberChecked(member=member.id, state="unknown", reason=clipped(reason)))

    # --- asked --------------------------------------------------------------------------------------------

    def check(self, message: cluster.CheckMembers, now: float) -> None:
        """Check members; the answer goes to the coordinator when all are done, or at the deadline."""
        asked = _Asked(message.check, now + message.timeout_s, message.timeout_s, set(message.members))
        if not asked.left:
            self._out(ToCoordinator(0, cluster.MembersChecked(check=asked.check, members=())))
            return
        if len(self._asked) >= MAX_ASKED:
            self._expire(asked, f"node {self._node} has {MAX_ASKED} checks under way already")
            return
        self._asked.append(asked)
        for member_id in sorted(asked.left):
            member = self._members.get(member_id)
            if member is None or member.is_source:
                gone = f"it is not registered on node {self._node} any more"
                self._tell(asked, cluster.MemberChecked(member=member_id, state="unknown", reason=gone))
            elif (check := self._checks.get(member_id)) is not None:
                check.later.append(asked)
            else:
                self._begin(member, [asked])

    def tick(self, now: float) -> None:
        """Answer what has waited long enough, naming whom it waits for; let work begin that nobody waits for."""
        for work in self._work:
            work.is_due = True
        for asked in [a for a in self._asked if now >= a.deadline]:
            self._expire(asked)

    def _expire(self, asked: _Asked, reason: str = "") -> None:
        for member_id in sorted(asked.left):
            check, member = self._checks.get(member_id), self._members.get(member_id)
            if check is not None:
                check.asked = [a for a in check.asked if a is not asked]
                check.later = [a for a in check.later if a is not asked]
            late = reason or self._late(check, member, asked.timeout_s)
            version = member.version if member is not None else None
            self._tell(asked, cluster.MemberChecked(member=member_id, state="unknown", version=version, reason=late))

    def _late(self, check: _Check | None, member: Member | None, timeout_s: float) -> str:
        within = f"within {timeout_s:.1f} s"
        if check is not None and member is not None and check.phase != "stored" and not member.live:
            return (
                f"its process (pid {member.pid} on node {self._node}) has not read its tensors {within}: it is "
                "stopped, or too busy; look at it"
            )
        what = "its staging arena" if check is None or check.phase == "stored" else "its live tensors"
        return f"the workers of node {self._node} have not read {what} {within}; they are stopped, or busy with a swap"

    def _begin(self, member: Member, asked: list[_Asked]) -> None:
        check = _Check(member.id, self._next(), -1, asked)
        self._checks[member.id] = check
        self._start(check, member)

    def _start(self, check: _Check, member: Member) -> None:
        if obstacle := self._obstacle(member):
            self._end(check, "unknown", obstacle)
            return
        assert member.version is not None
        check.version = member.version
        if member.proof is not None:
            self._read_live(check, member)
            return
        check.phase = "stored"
        begun = [w for w in self._work if w.member == member.id and w.what == "stored"]
        for work in begun:
            work.is_urgent = True
        if not begun and not member.in_place:
            self._take_stored(member, is_urgent=True)
        elif not begun:
            # a digest of what it holds now would prove nothing
            reason = f"the digest of version {member.version} could not be taken after it was written; swap again"
            self._end(check, "unknown", reason)

    def _obstacle(self, member: Member) -> str:
        """Return why a member cannot be checked; "" where it can."""
        if member.version is None:
            return "it serves nothing"
        if member.fenced:
            return f"it serves nothing at present: it is fenced ({member.fenced})"
        if not member.verifies:
            model = member.registration.model
            return f"[models.{model}] verify is false in the coordinator's configuration: no digests are taken"
        if member.writing is not None:
            return f"swap {member.writing} is writing it in place"
        if member.proof is not None and member.proof.version == member.version:
            return ""
        if member.holds != member.version:
            return (
                f"the digest of version {member.version} was not taken: its staging arena was used again before, or it "
                "registered with that version; after the next swap there is one"
            )
        return ""

    def _again(self, check: _Check) -> None:
        """Begin a check anew: what it was about has changed."""
        check.attempts += 1
        check.number = self._next()
        check.differing = []
        self._work = [w for w in self._work if w.member != check.member or w.what == "stored"]
        member = self._members.get(check.member)
        if member is None or check.attempts > ATTEMPTS:
            reason = f"versions were staged or taken over {check.attempts - 1} times while it was read; ask again"
            self._end(check, "unknown", reason)
        else:
            self._start(check, member)

    # --- steps of a check ---------------------------------------------------------------------------------

    def _take_stored(self, member: Member, *, is_urgent: bool) -> None:
        if member.holds is None:
            return
        layout, places = _Layout(member), member.decided_places()
        spans = [layout.span(places, block) for block in layout.blocks]
        self._add(_Work(member.id, "stored", member.holds, spans, [], [], is_urgent))

    def _read_live(self, check: _Check, member: Member) -> None:
        check.phase = "live"
        layout = _Layout(member)
        if member.live:
            spans = [layout.span(member.live, block) for block in layout.blocks]
            self._add(_Work(member.id, "live", check.version, spans, [], [], True))
        elif member.session is not None:
            message = local.DigestLive(member=member.id, check=check.number, steps=layout.steps)
            self._out(ToClient(member.session, 0, message))

    def _live_read(self, check: _Check, digests: bytes) -> None:
        member = self._members[check.member]
        proof = member.proof
        if proof is None or not proof.version == member.version == check.version or member.writing is not None:
            self._again(check)
            return
        if len(digests) != len(proof.digests):
            self._end(check, "unknown", f"{len(digests)} bytes of digests came, expected {len(proof.digests)}")
            return
        layout = _Layout(member)
        check.differing = [
            block
            for block, live, expected in zip(layout.blocks, _cut(digests), _cut(proof.digests), strict=True)
            if live != expected
        ]
        if not check.differing:
            self._end(check, "proven")
        elif member.live and member.committing:
            self._end(check, "unknown", "the workers may be writing another version into its tensors; ask again")
        elif member.holds != check.version or member.in_place:
            self._differs(check, [])
        else:
            self._locate(check, member, layout)

    def _locate(self, check: _Check, member: Member, layout: _Layout) -> None:
        check.phase = "compare"
        blocks = check.differing[:MAX_DIFFERENCES]
        if member.live:
            spans, others = (
                [layout.span(places, block) for block in blocks] for places in (list(member.live), member.held_places())
            )
            self._add(_Work(member.id, "compare", check.version, spans, others, [], True))
        elif member.session is not None:
            wanted = tuple((block.tensor, block.first, block.count) for block in blocks)
            message = local.CompareLive(member=member.id, check=check.number, blocks=wanted)
            self._out(ToClient(member.session, 0, message))

    def _located(self, check: _Check, found: list[tuple[int, int, int]]) -> None:
        member = self._members[check.member]
        # the staging arena may have been written to meanwhile: then it has nothing to say about this version
        valid = member.holds == check.version == member.version and not (member.live and member.committing)
        self._differs(check, found if valid else [])

    def _differs(self, check: _Check, found: list[tuple[int, int, int]]) -> None:
        layout = _Layout(self._members[check.member])
        differences = tuple(
            layout.difference(block, found[i] if i < len(found) else None)
            for i, block in enumerate(check.differing[:MAX_DIFFERENCES])
        )
        names = len({block.tensor for block in check.differing})
        reason = f"{len(check.differing)} blocks of {names} tensors are not those of version {check.version}"
        self._log("differs", member=check.member, version=check.version, blocks=len(check.differing))
        self._end(check, "differs", reason, differences)

    def _end(
        self,
        check: _Check,
        state: Literal["proven", "differs", "unknown"],
        reason: str = "",
        differences: tuple[Difference, ...] = (),
    ) -> None:
        member = self._members.get(check.member)
        known = member is not None and member.proof is not None and state != "unknown"
        serves = member.version if member is not None and not member.fenced else None
        report = cluster.MemberChecked(
            member=check.member,
            state=state,
            version=check.version if state != "unknown" else serves,
            reason=clipped(reason),
            bytes=_Layout(member).nbytes if member is not None and known else 0,
            digest=xxhash.xxh3_128_hexdigest(member.proof.digests) if member and member.proof and known else "",
            form=_form(member) if member is not None else "",
            blocks=len(check.differing) if state == "differs" else 0,
            differences=differences,
        )
        self._checks.pop(check.member, None)
        for asked in check.asked if member is not None else [*check.asked, *check.later]:
            self._tell(asked, report)
        if check.later and member is not None:
            self._begin(member, check.later)

    def _tell(self, asked: _Asked, report: cluster.MemberChecked) -> None:
        asked.left.discard(report.member)
        asked.found.append(report)
        if not asked.left:
            self._asked = [a for a in self._asked if a is not asked]
            self._out(ToCoordinator(0, cluster.MembersChecked(check=asked.check, members=tuple(asked.found))))

    # --- clients ------------------------------------------------------------------------------------------

    def client_said(self, member: Member, message: local.LiveDigests | local.LiveCompared) -> None:
        """Take a client's word about its live tensors."""
        check = self._checks.get(member.id)
        if check is None or check.number != message.check:
            return
        match message:
            case local.LiveDigests(_, _, _, _, True):
                self._again(check)
            case local.LiveDigests(_, _, _, reason) if reason and check.phase == "live":
                self._end(check, "unknown", reason)
            case local.LiveDigests(_, _, digests) if check.phase == "live":
                self._live_read(check, digests)
            case local.LiveCompared(_, _, found) if check.phase == "compare":
                self._located(check, list(found))
            case _:
                pass

    # --- workers ------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Give workers that have none of it something to do: what is asked for first, the rest while no swap runs."""
        if not self._work:
            return
        for work in [w for w in self._work if not self._is_wanted(w)]:
            self._unwanted(work)
        taken = {run.worker for run in self._runs.values()}
        for worker in (w for w in range(self._workers) if w not in taken):
            mine = [w for w in self._work if w.left and w.home in (None, worker)]
            due = [w for w in mine if w.is_urgent]
            if not due and not self._is_swapping() and all(run.work.is_urgent for run in self._runs.values()):
                due = [w for w in mine if w.is_due]
            if due:
                self._send(due[0], worker)

    def _is_wanted(self, work: _Work) -> bool:
        member = self._members.get(work.member)
        return member is not None and (work.what == "live" or member.holds == work.version)

    def _unwanted(self, work: _Work) -> None:
        """The staging arena does not hold the version any more that this is about."""
        self._work = [w for w in self._work if w is not work]
        check = self._checks.get(work.member)
        if check is None or check.phase != work.what:
            return
        if work.what == "compare":
            self._differs(check, [])
        else:
            self._again(check)

    def _add(self, work: _Work) -> None:
        work.left = list(_batches(work.spans)) if not work.others else [range(i, i + 1) for i in range(len(work.spans))]
        homes = self._homes({span.arena for span in (*work.spans, *work.others)})
        work.home = next(iter(homes.values()), None)
        self._work.append(work)
        if not work.left:
            self._done(work)  # all its tensors are empty

    def _send(self, work: _Work, worker: int) -> None:
        batch, number = work.left.pop(0), self._next()
        self._runs[number] = _Run(work, batch, worker)
        spans = tuple(work.spans[i] for i in batch)
        others = tuple(work.others[i] for i in batch) if work.others else ()
        self._need(worker, {span.arena for span in (*spans, *others)})
        message: sidecar.TakeDigests | sidecar.CompareSpans = sidecar.TakeDigests(run=number, spans=spans)
        if work.others:
            message = sidecar.CompareSpans(run=number, pairs=tuple(zip(spans, others, strict=True)))
        self._out(ToWorker(worker, message))

    def worker_said(self, message: sidecar.DigestsTaken | sidecar.SpansCompared) -> None:
        """Take a worker's results."""
        run = self._runs.pop(message.run, None)
        if run is None or not any(run.work is work for work in self._work):
            return
        work = run.work
        if message.reason:
            self._failed(work, message.reason)
            return
        found = _cut(message.digests) if isinstance(message, sidecar.DigestsTaken) else message.found
        work.results |= dict(zip(run.batch, found, strict=True))
        if len(work.results) == len(work.spans):
            self._done(work)

    def worker_gone(self, worker: int) -> None:
        """A worker has died or was replaced: others, or the next one, do what it had."""
        for number, run in list(self._runs.items()):
            if run.worker == worker:
                del self._runs[number]
                run.work.left.append(run.batch)
                run.work.attempts += 1
                if run.work.attempts > ATTEMPTS and any(run.work is work for work in self._work):
                    self._failed(run.work, f"workers of node {self._node} died {ATTEMPTS} times meanwhile")

    def _done(self, work: _Work) -> None:
        self._work = [w for w in self._work if w is not work]
        member = self._members.get(work.member)
        if member is None or not self._is_wanted(work):
            self._unwanted(work)
            return
        check = self._checks.get(work.member)
        if check is not None and check.phase != work.what:
            check = None
        results = [work.results[i] for i in range(len(work.spans))]
        if work.what == "compare":
            if check is not None:
                self._located(check, [found for found in results if isinstance(found, tuple)])
            return
        digests = b"".join(found for found in results if isinstance(found, bytes))
        if work.what == "live":
            if check is not None:
                self._live_read(check, digests)
            return
        member.proof = Proof(work.version, digests)
        self._log("digests", member=member.id, version=work.version, blocks=len(results))
        if check is not None:
            self._start(check, member)

    def _failed(self, work: _Work, reason: str) -> None:
        self._work = [w for w in self._work if w is not work]
        self._log("digests-failed", member=work.member, what=work.what, reason=reason)
        check = self._checks.get(work.member)
        if check is not None and check.phase == work.what:
            if work.what == "compare":
                self._differs(check, [])
            else:
                self._end(check, "unknown", reason)

    def _drop_work(self, member: str) -> None:
        self._work = [w for w in self._work if w.member != member]

    # --- details ------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _log(self, event: str, **fields: object) -> None:
        self._out(Log(event, fields))


def _batches(spans: list[sidecar.Span]) -> Iterator[range]:
    """Cut spans into runs of about RUN_BYTES."""
    begin, nbytes, numbers = 0, 0, 0
    for i, span in enumerate(spans):
        size, cost = span.count * span.element_size, 2 * len(span.shape) + 5
        if i > begin and (nbytes + size > RUN_BYTES or numbers + cost > RUN_NUMBERS):
            yield range(begin, i)
            begin, nbytes, numbers = i, 0, 0
        nbytes, numbers = nbytes + size, numbers + cost
    if begin < len(spans):
        yield range(begin, len(spans))


def _cut(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def _form(member: Member) -> str:
    """Return a name for what a member holds beside its shard: members of one shard and form hold the same bytes."""
    r = member.registration
    assert isinstance(r, RegisterTarget)
    return xxhash.xxh3_128_hexdigest(repr((held_of(r), r.conversions)).encode())
