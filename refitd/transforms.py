"""Conversions of parameters on their way to the destination: the ReshardTransform interface, and casts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import torch

from refitd.dtypes import dtype_name
from refitd.errors import RefusedError

Slices = tuple[slice, ...]


class ReshardTransform(ABC):
    """Replaces sending, receiving and writing of the parameters that it selects (Megatron-Core: `ReshardTransform`).

    A sender without a transform sends each piece as one tensor. If the sender sends one tensor per piece, the
    receiver's `prepare_recv` must return one buffer with the same number of elements and dtype. If a transform makes
    several tensors per piece (data and scale), both ends need it, and the tensors match one by one. The two ends
    compare what they will exchange before anything is sent.

    The order of calls; all receiving of a parameter happens between begin_recv and finish_recv:

        send_dtype, recv_dtype   while planning              an error refuses the plan on every rank
        prepare_send    each piece, once for all receivers   before any transfer; an error refuses it
        begin_recv      all pieces                           before any transfer; an error refuses it
        prepare_recv    each piece                           before any transfer; an error refuses it
        finalize_recv   each piece, in any order             everything has arrived
        finish_recv     once
    """

    def should_transform(self, param_name: str) -> bool:
        """Return whether this parameter, named as in this rank's own module, goes through the transform."""
        return False

    def send_dtype(self, param_name: str, src_param: torch.Tensor, dtype: torch.dtype | str) -> torch.dtype | None:
        """Return the dtype that this rank sends; None for `dtype`, the dtype after declared casts.

        Planning compares it with `recv_dtype`, and refuses a parameter for which they differ.
        """
        return None

    def recv_dtype(self, param_name: str, dst_param: torch.Tensor) -> torch.dtype | None:
        """Return the dtype that must arrive; None for the dtype of the destination module's tensor."""
        return None

    @abstractmethod
    def prepare_send(self, param_name: str, src_slice: Slices, src_param: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors to send for one piece of `src_param`, this rank's local tensor after declared casts."""

    def begin_recv(self, param_name: str, dst_slices: Sequence[Slices]) -> None:  # noqa: B027 - most need none
        """Prepare to receive a parameter; `dst_slices` are all its pieces."""

    @abstractmethod
    def prepare_recv(self, param_name: str, dst_slice: Slices) -> list[torch.Tensor]:
        """Return the buffers that receive one piece, as many as `prepare_send` returns tensors."""

    @abstractmethod
    def finalize_recv(self, param_name: str, dst_slice: Slices, recv_buffers: list[torch.Tensor]) -> None:
        """Write one received piece to its destination, in place. Called after everything has arrived."""

    def finish_recv(self, param_name: str) -> None:  # noqa: B027 - most need none
        """Finish a parameter after all its pieces have been finalized."""


class CastTransform(ReshardTransform):
    """Converts elements (by default float32 to bfloat16, rounded to nearest) into persistent tensors, in place.

    The `casts` of `reshard_model_weights` do the same for the module's own tensors.
    """

    def __init__(
        self,
        convertible_params: Collection[str],
        persistent_buffers: Mapping[str, torch.Tensor],
        buffer_key_prefix: str = "",
        convert_on_send: bool = False,
        *,
        from_dtype: torch.dtype = torch.float32,
        to_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Check every tensor; raises RefusedError if one is not `to_dtype`.

        Args:
            convertible_params: the parameters to convert, named as in this rank's own module.
            persistent_buffers: the tensors to write, by name without the prefix. Empty on ranks that only send.
            buffer_key_prefix: a prefix of parameter names that buffer names lack.
            convert_on_send: senders convert, and fewer bytes travel; both ends then need the transform.
            from_dtype: the dtype of the sources.
            to_dtype: the dtype of the written tensors.
        """
        self._names = frozenset(convertible_params)
        self._buffers = dict(persistent_buffers)
        self._prefix = buffer_key_prefix
        self._from, self._to = from_dtype, to_dtype
        self._on_send = convert_on_send
        wrong = [f"{name} is {dtype_name(t.dtype)}" for name, t in self._buffers.items() if t.dtype != to_dtype]
        if wrong:
            raise RefusedError(f"{'; '.join(wrong)}; expected {dtype_name(to_dtype)}")

    def should_transform(self, param_name: str) -> bool:
        """See ReshardTransform.should_transform."""
        return param_name in self._names

    def send_dtype(self, param_name: str, src_param: torch.Tensor, dtype: torch.dtype | str) -> torch.dtype | None:
        """See ReshardTransform.send_dtype."""
        self._check_source(param_name, dtype)
        return self._to if self._on_send else None

    def recv_dtype(self, param_name: str, dst_param: torch.Tensor) -> torch.dtype | None:
        """See ReshardTransform.recv_dtype."""
        found = self._buffer(param_name)
        if found.shape != dst_param.shape:
            raise RefusedError(
                f"{param_name}: its persistent tensor has shape {list(found.shape)}, expected {list(dst_param.shape)}"
            )
        return self._to if self._on_send else self._from

    def prepare_send(self, param_name: str, src_slice: Slices, src_param: torch.Tensor) -> list[torch.Tensor]:
        """See ReshardTransform.prepare_send."""
        self._check_source(param_name, src_param.dtype)
        piece = src_param.detach()[src_slice]
        return [piece.to(self._to) if self._on_send else piece]

    def prepare_recv(self, param_name: str, dst_slice: Slices) -> list[torch.Tensor]:
        """See ReshardTransform.prepare_recv. Converted elements are received directly in their destination."""
        place = self._place(param_name, dst_slice)
        return [place if self._on_send else torch.empty_like(place, dtype=self._from)]

    def finalize_recv(self, param_name: str, dst_slice: Slices, recv_buffers: list[torch.Tensor]) -> None:
        """See ReshardTransform.finalize_recv."""
        place, (found,) = self._place(param_name, dst_slice), recv_buffers
        if found.data_ptr() != place.data_ptr():
            place.copy_(found.view(place.shape))

    def _check_source(self, param_name: str, dtype: torch.dtype | str) -> None:
        if dtype_name(dtype) != dtype_name(self._from):
            raise RefusedError(f"{param_name}: it is {dtype_name(dtype)}, expected {dtype_name(self._from)}")

    def _buffer(self, param_name: str) -> torch.Tensor:
        key = param_name.removeprefix(self._prefix)
        if key not in self._buffers:
            raise RefusedError(f"{param_name}: no persistent tensor is called {key!r}; pass one to the transform")
        return self._buffers[key]

    def _place(self, param_name: str, dst_slice: Slices) -> torch.Tensor:
        return self._buffer(param_name)[dst_slice]
