"""Divide tensors among trainer ranks that all yield all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

import refitd

Weights = Iterable[tuple[str, torch.Tensor]]


class PublishedShare:
    """The tensors that one policy rank publishes: each goes to the rank with the fewest bytes so far.

    All ranks see all tensors in the same order, so they agree without communication.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._rank, self._bytes, self._mine = rank, [0] * world_size, set[str]()
        self.holders = 0  # the number of ranks that publish anything; they are the first ones

    def first(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Record all tensors of the first refit; yield those of this rank."""
        for name, tensor in _pairs(weights):
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
        """Check that all tensors are those of the first refit; yield those of this rank."""
        left = dict(self.shapes)
        for name, tensor in _pairs(weights):
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

    def check_offered(self, offered: dict[str, tuple[tuple[int, ...], torch.dtype]], mark: str) -> None:
        """Raise RefusedError if policy ranks yielded different tensors: some would reach no engine."""
        theirs = {name: what for name, what in offered.items() if name != mark}
        if theirs != self.shapes:
            differ = [n for n in {**self.shapes, **theirs} if self.shapes.get(n) != theirs.get(n)]
            raise refitd.RefusedError(
                f"the policy ranks do not yield the same tensors in the same order: {len(differ)} differ: "
                f"{differ[:10]}; shut the weight synchronizer down, so that all ranks are prepared anew"
            )


def _pairs(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the iterator's items; raise RefusedError for one that is not (name, tensor)."""
    for item in weights:
        try:
            name, tensor = item
        except (TypeError, ValueError):
            raise refitd.RefusedError(f"the iterator yields a {type(item).__name__}, expected (name, tensor)") from None
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise refitd.RefusedError(f"the iterator yields {name!r:.100} with a {type(tensor).__name__}")
        yield name, tensor
