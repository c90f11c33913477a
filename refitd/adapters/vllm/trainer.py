"""Implement the trainer side of vLLM's weight transfer interface; a script switches to it by the backend's name."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

import refitd
from refitd.adapters.driving import Fleet, swap_and_drive


@dataclass
class RefitdTrainerInitInfo(TrainerInitInfo):
    """This trainer rank's shard of a model. `tensors` is a module, or {name: tensor}, as in `register_source`."""

    backend: ClassVar[str] = "refitd"
    tensors: Any = None
    model: str = "policy"
    world_size: int = 1
    runtime_dir: str = ""
    wait_s: float = 60.0  # for the other trainer ranks to publish
    register: dict[str, Any] | None = None  # further arguments of `register_source`
    engine: dict[str, Any] | None = None  # settings of the engines (refitd.adapters.vllm.settings.RefitdInitInfo)


class RefitdTrainer(TrainerWeightTransferEngine[RefitdTrainerInitInfo]):
    """Publish on every rank; rank 0 swaps, and makes vLLM wait for the version."""

    init_info_cls = RefitdTrainerInitInfo

    def __init__(
        self, info: RefitdTrainerInitInfo, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        if info.tensors is None:
            raise refitd.RefusedError("tensors is None, expected the module or the tensors of this rank")
        self._info = info
        self._refitd = refitd.connect(info.runtime_dir or None)
        self._source = self._refitd.register_source(
            info.model, info.tensors, rank=info.rank, world_size=info.world_size, **(info.register or {})
        )
        self._version = self._source.next_version - 1
        self._fleet = Fleet(self._refitd, info.model)

    @classmethod
    def trainer_init(
        cls,
        init_info: RefitdTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Register this rank; rank 0 also makes the engines register."""
        made = cls(init_info, client, source)
        if made.is_sender:
            made._fleet.prepare(made._init_engines, made._catch_up)
        return made

    def send_weights(self) -> None:
        """Make the present weights live in every replica; call it on every rank.

        Raises:
            SwapFailed, RefusedError: the swap failed; the engines keep serving their version.
        """
        self._version += 1
        self._source.publish(self._version)
        if not self.is_sender:
            return
        self._fleet.prepare(self._init_engines, self._catch_up)
        # other ranks may not have published yet
        swap_and_drive(self._refitd, self._info.model, self._version, self._update, wait=self._info.wait_s)

    def _init_engines(self) -> None:
        self.client.init_weight_transfer_engine({"model": self._info.model, **(self._info.engine or {})})

    def _catch_up(self) -> None:
        self.client.start_weight_update()  # commits a pending version
        self.client.finish_weight_update()

    def _update(self) -> None:
        self.client.start_weight_update()
        self.client.update_weights({"version": self._version})  # if it fails, vLLM ends the update itself
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Close this rank's registration and connection."""
        with contextlib.suppress(refitd.RefitdError):  # the daemon may be lost
            self._source.close()
        self._refitd.close()
