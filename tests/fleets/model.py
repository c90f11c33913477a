"""A random model: its sources in one layout, its replicas in others, and the weights of each version."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

import refitd
from refitd import MXFP8Buffer, ParameterMetadata
from refitd.client.streamed import StreamedSource
from refitd.testing import Engine
from tests.support.controls import nothing

Tensors = dict[str, torch.Tensor]
KINDS = ("copy", "copy", "flip", "adopted", "kept", "mxfp8", "in-place")
OFFERS = ("own", "own", "arena", "streamed")
LENT = 0.25  # share of versions that are lent


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is split: in `stride` blocks, each evenly along `dim`; None: not at all."""

    dim: int | None
    stride: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Pipeline stages of `tp` ranks each; stage i has every `stages`-th tensor, starting with the i-th."""

    stages: int
    tp: int
    is_whole: bool = False  # each rank has all tensors of its stage

    @property
    def world_size(self) -> int:
        return self.stages * self.tp

    def group(self, rank: int) -> list[int]:
        """Return the ranks of this rank's stage."""
        first = rank - rank % self.tp
        return list(range(first, first + self.tp))


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a replica."""

    replica: str
    kind: str
    layout: Layout
    rank: int
    dtype: torch.dtype
    live: Mapping[str, Any]
    target: refitd.Target


@dataclass
class Model:
    """Random tensors, sources and replicas over the given clients.

    Attributes:
        whole: the trainer's weights, as they are now.
            states: the weights of each published version, before the sources' cast.
        version: the newest one.
            has_lent: whether a source rank has lent the newest version: its lease ends with the rank's daemon.
    """

    name: str
    clients: Sequence[refitd.Client]
    random: random.Random
    whole: Tensors = field(init=False)
    states: dict[int, Tensors] = field(init=False, default_factory=dict)
    version: int = field(init=False, default=0)
    has_lent: bool = field(init=False, default=False)
    ranks: list[Rank] = field(init=False, default_factory=list)
    controllers: dict[str, refitd.ReplicaController] = field(init=False, default_factory=dict)  # of those in place
    _lent: ExitStack = field(init=False, default_factory=ExitStack)  # until the next version is published

    def __post_init__(self) -> None:
        choice = self.random.choice
        self.generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        self.dtype = choice((torch.bfloat16, torch.float32, torch.float32))
        self.cuts: dict[str, Cut] = {}
        self.whole = {}
        for number in range(self.random.randint(2, 7)):
            shape = self._shape()
            dim = choice((None, *range(len(shape))))
            stride = choice((1, 1, 1, 2, 3)) if dim is not None and shape[dim] % 72 == 0 else 1
            self.cuts[f"t{number}.w"] = Cut(dim, stride)
            self.whole[f"t{number}.w"] = torch.randn(shape, generator=self.generator).to(self.dtype)
        self.casts = self.dtype is torch.float32 and self.random.random() < 0.5
        self.offered = torch.bfloat16 if self.casts else self.dtype
        ranks = choice((1, 2, 3, 4))
        self.layout = choice((Layout(1, ranks), Layout(1, ranks), Layout(1, ranks, is_whole=True), Layout(ranks, 1)))
        self.sources = [self._offered(rank, ranks) for rank in range(ranks)]
        for number in range(self.random.randint(1, 3)):
            self.add(f"replica{number}")

    def _shape(self) -> tuple[int, ...]:
        choice = self.random.choice
        if self.random.random() < 0.3:
            return 12 * choice((1, 8)), 96 * choice((1, 2, 4))  # a shape that MXFP8 can convert
        return tuple(12 * choice((1, 2, 4, 6, 24)) for _ in range(choice((1, 2, 2, 3))))

    def part(self, whole: Mapping[str, torch.Tensor], layout: Layout, rank: int) -> Tensors:
        """Return a rank's part of whole tensors."""
        stage, place = divmod(rank, layout.tp)
        names = [name for number, name in enumerate(whole) if number % layout.stages == stage]
        if layout.is_whole:
            return {name: whole[name].clone() for name in names}
        return {name: _cut(whole[name], self.cuts[name], place, layout.tp) for name in names}

    def described(self, held: Mapping[str, torch.Tensor], layout: Layout, rank: int) -> list[ParameterMetadata]:
        """Describe a rank's part."""
        return [
            ParameterMetadata(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                element_size=tensor.element_size(),
                is_tp=self.cuts[name].dim is not None and layout.tp > 1 and not layout.is_whole,
                partition_dim=self.cuts[name].dim or 0,
                partition_stride=self.cuts[name].stride,
                owner_rank=rank,
                tensor_parallel_group_ranks=layout.group(rank),
                resolved_name=name,
            )
            for name, tensor in held.items()
        ]

    def _offered(self, rank: int, ranks: int) -> tuple[refitd.Source | StreamedSource, Tensors, str]:
        """Register a source rank that publishes its own memory or an arena, or yields its tensors one by one."""
        client, held = self.random.choice(self.clients), self.part(self.whole, self.layout, rank)
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
        options: dict[str, Any] = {"rank": rank, "world_size": ranks}
        options["metadata"] = self.described(held, self.layout, rank)
        options["cast"] = self.offered if self.casts else None
        kind = self.random.choice(OFFERS)
        if kind == "streamed":
            return client.declare_source(self.name, shapes, **options), {}, kind
        live = client.allocate(shapes) if kind == "arena" else held
        return client.register_source(self.name, live, **options), live, kind

    def add(self, replica: str) -> None:
        """Register a replica of a random kind and layout."""
        choice = self.random.choice
        kind = choice(KINDS)
        if kind == "mxfp8" and self.offered is not torch.bfloat16:
            kind = "copy"
        narrows = kind != "mxfp8" and self.offered is torch.float32 and self.random.random() < 0.6
        dtype = torch.bfloat16 if narrows else self.offered
        tp, stages = (1, 1) if kind in ("mxfp8", "in-place") else (choice((1, 1, 2, 4)), choice((1, 1, 2)))
        layout = Layout(stages, tp)
        dtypes = dict.fromkeys(self.whole, dtype)
        if self.casts and kind != "mxfp8" and self.random.random() < 0.6:  # some tensors stay unrounded in this engine
            dtypes = {name: choice((torch.bfloat16, torch.float32, torch.float16)) for name in self.whole}
        for rank in range(layout.world_size):
            self.ranks.append(self._registered(replica, kind, layout, rank, dtypes))

    def _registered(
        self, replica: str, kind: str, layout: Layout, rank: int, dtypes: Mapping[str, torch.dtype]
    ) -> Rank:
        client = self.random.choice(self.clients)
        part = self.part(self.whole, layout, rank)
        held = {name: torch.zeros_like(tensor, dtype=dtypes[name]) for name, tensor in part.items()}
        options: dict[str, Any] = {"metadata": self.described(held, layout, rank)}
        live: Mapping[str, Any] = held
        match kind:
            case "flip" | "in-place":
                live = client.allocate({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()})
                options["mode"] = kind
                if kind == "in-place":
                    self.controllers[replica] = client.control_replica(
                        self.name, replica, pause=nothing, commit=nothing
                    )
            case "adopted" | "kept":
                module = _module(held)
                client.adopt(module, keep_addresses=kind == "kept")
                live = {name: parameter.detach() for name, parameter in module.named_parameters()}
            case "mxfp8":
                live = {
                    name: MXFP8Buffer.empty(tuple(t.shape)) if t.dim() == 2 and t.shape[1] % 32 == 0 else t
                    for name, t in held.items()
                }
                options = {}
        if self.casts:
            options["cast"] = (kind != "mxfp8" and self.random.random() < 0.5) or {*dtypes.values()} != {self.offered}
        elif {*dtypes.values()} != {self.offered}:
            options["cast"] = self.offered
        target = client.register_target(
            self.name, live, replica=replica, rank=rank, world_size=layout.world_size, **options
        )
        return Rank(replica, kind, layout, rank, next(iter(dtypes.values())), live, target)

    def polls(self) -> AbstractContextManager[object]:
        """Poll for all ranks on one thread, or have each rank wait on a separate thread."""
        targets = [rank.target for rank in self.ranks]
        return self.random.choice((Engine(*targets), _waiting(targets)))

    def publish(self) -> int:
        """Change 0, 1 or 100 % of the elements, and publish; return the version."""
        share = self.random.choice((0.0, 0.01, 0.01, 1.0))
        for tensor in self.whole.values():
            which = torch.rand(tensor.shape, generator=self.generator) < share
            tensor[which] = torch.randn(int(which.sum()), generator=self.generator).to(tensor.dtype)
        self.version += 1
        self._lent.close()
        self.has_lent = False
        for rank, (source, held, kind) in enumerate(self.sources):
            parts = self.part(self.whole, self.layout, rank)
            for name, tensor in held.items():
                tensor.copy_(parts[name])
            if isinstance(source, StreamedSource):
                source.publish_from(self.version, self.random.sample([*parts.items()], len(parts)))
            elif kind == "arena" or self.random.random() < LENT:
                self._lent.enter_context(source.lend(self.version))
                self.has_lent = True
            else:
                source.publish(self.version)
        self.states[self.version] = {name: tensor.clone() for name, tensor in self.whole.items()}
        return self.version

    def check(self, version: int | None = None) -> None:
        """Compare every rank with the version that it serves, which must be `version` if that is given.

        Raises:
            AssertionError: a rank has other bytes, ranks of a replica serve different versions, or one is fenced.
        """
        serving: dict[str, set[int | None]] = {}
        for rank in self.ranks:
            served = rank.target.version
            serving.setdefault(rank.replica, set()).add(served)
            assert not rank.target.fenced, f"{self.name} {rank.replica} {rank.rank}: {rank.target.fenced}"
            for name, tensor in self.part(self.states[served], rank.layout, rank.rank).items() if served else ():
                what = f"{self.name} version {served}: {name} of {rank.replica} rank {rank.rank}, {rank.kind}"
                is_exact = self.casts and not isinstance(rank.live[name], MXFP8Buffer)
                assert _holds(rank.live[name], tensor if is_exact else tensor.to(self.offered)), what
        assert all(len(versions) == 1 for versions in serving.values()), f"{self.name} is torn: {serving}"
        if version is not None:
            assert set().union(*serving.values()) == {version}, f"{self.name}: {serving}, expected {version}"


def _module(shapes: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return a module with a parameter of zeros for each "name.w"."""
    module = torch.nn.Module()
    for name, tensor in shapes.items():
        inner = torch.nn.Module()
        inner.w = torch.nn.Parameter(torch.zeros_like(tensor))
        module.add_module(name.removesuffix(".w"), inner)
    return module


@contextmanager
def _waiting(targets: Sequence[refitd.Target]) -> Iterator[None]:
    """Have each target wait for versions on a separate thread, until the block ends."""
    is_over = threading.Event()

    def wait(target: refitd.Target) -> None:
        while not is_over.is_set():
            with suppress(refitd.DeadlineExceeded):
                target.wait((target.version or 0) + 1, timeout=0.3)

    with ThreadPoolExecutor(len(targets)) as ranks:
        waits = [ranks.submit(wait, target) for target in targets]
        try:
            yield
        finally:
            is_over.set()
    for one in waits:
        one.result()


def _cut(tensor: torch.Tensor, cut: Cut, place: int, ranks: int) -> torch.Tensor:
    if cut.dim is None or ranks == 1:
        return tensor.clone()
    blocks = tensor.chunk(cut.stride, cut.dim)
    return torch.cat([block.chunk(ranks, cut.dim)[place] for block in blocks], cut.dim).contiguous()


def _holds(live: Any, wanted: torch.Tensor) -> bool:
    if isinstance(live, MXFP8Buffer):
        once = MXFP8Buffer.empty(tuple(wanted.shape))
        once.quantize(wanted)
        return torch.equal(once.data, live.data) and torch.equal(once.scale, live.scale)
    return torch.equal(wanted.to(live.dtype).contiguous().view(torch.uint8), live.contiguous().view(torch.uint8))
