"""CastTransform: write weights of one float dtype into an engine's existing tensors of another."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from refitd.dtypes import dtype_name
from refitd.errors import RefusedError
from refitd.transforms.base import ReshardTransform, Slices


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
            convert_on_send: senders convert, so that fewer bytes travel; both ends then need the transform.
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
