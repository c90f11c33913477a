"""The tensors that a trainer yields one by one: checks of the items, the first update's copies, shares of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

import refitd

Weights = Iterable[tuple[str, torch.Tensor]]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class FirstStream:
    """The tensors of a first update, copied into main memory, because shapes are declared before tensors are published.

    Attributes:
        shapes: {name: (shape, dtype)}.
    """

    def __init__(self, weights: Weights) -> None:
        """Copy all tensors; each may be overwritten when the next one is requested.

        Raises:
            RefusedError: an item is not (name, tensor), a name comes twice, or there are no tensors.
        """
        share = PublishedShare(0, 1)
        self._copies = {name: copied(tensor) for name, tensor in share.first(weights)}
        self.shapes = share.shapes

    def drained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, and free each one afterwards."""
        while self._copies:
            name = next(iter(self._copies))
            yield name, self._copies.pop(name)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in main memory."""
    return tensor.detach().to("cpu", copy=True)


class PublishedShare:
    """The tensors that one policy rank publishes: each tensor goes to the rank with the fewest bytes so far.

    All ranks see all tensors in the same order, so they agree without communication.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.shapes: Shapes = {}
        self._rank, self._bytes, self._mine = rank, [0] * world_size, set[str]()
        self.holders = 0  # the number of ranks that publish anything; they are the first ones

    def first(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Record all tensors of the first refit; yield this rank's tensors."""
        for name, tensor in pairs(weights):
            if name in self.shapes:
                raise refitd.RefusedError(f"{name}: the iterator yields it twice")
            self.shapes[name] = tuple(tensor.shape), tensor.dtype
            owner = self._bytes.index(min(self._bytes))
            self._bytes[owner] += max(1, tensor.nbytes)
            self.holders = max(self.holders, owner + 1)
            if owner == self._rank:
                self._mine.add(name)
                yield name, tensor
        if not self.shapes:
            raise refitd.RefusedError("the iterator yields no tensors")

    def again(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Check that the tensors match the first refit; yield this rank's tensors."""
        left = dict(self.shapes)
        for name, tensor in pairs(weights):
            if name not in left:
                how = "yields it twice" if name in self.shapes else "has not yielded it in the first refit"
                raise refitd.RefusedError(f"{name}: the iterator {how}")
            shape, dtype = left.pop(name)
            if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise refitd.RefusedError(
                    f"{name}: it is {list(tensor.shape)} {tensor.dtype}, "
                    f"in the first refit it was {list(shape)} {dtype}"
                )
            if name in self._mine:
                yield name, tensor
        if left:
            raise refitd.RefusedError(
                f"the iterator has ended without {len(left)} of {len(self.shapes)} tensors: {[*left][:10]}"
            )

    def check_offered(self, offered: Shapes, mark: str) -> None:
        """Raise RefusedError if policy ranks yielded different tensors: some of them would reach no engine."""
        theirs = {name: what for name, what in offered.items() if name != mark}
        if theirs != self.shapes:
            differ = [n for n in {**self.shapes, **theirs} if self.shapes.get(n) != theirs.get(n)]
            raise refitd.RefusedError(
                f"the policy ranks do not yield the same tensors in the same order: {len(differ)} differ: "
                f"{differ[:10]}; shut the weight synchronizer down, so that all ranks are prepared anew"
            )


def pairs(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the iterator's items; raise RefusedError for an item that is not (name, tensor)."""
    for item in weights:
        try:
            name, tensor = item
        except (TypeError, ValueError):
            raise refitd.RefusedError(f"the iterator yields a {type(item).__name__}, expected (name, tensor)") from None
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise refitd.RefusedError(f"the iterator yields {name!r:.100} with a {type(tensor).__name__}")
        yield name, tensor
