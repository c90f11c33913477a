"""The base class of engines of verl 0.9, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar


class CheckpointEngine(ABC):
    """The methods that verl calls on an engine."""

    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> Any: ...

    @classmethod
    @abstractmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class CheckpointEngineRegistry:
    """Engines by the name of their backend."""

    _engines: ClassVar[dict[str, type[CheckpointEngine]]] = {}

    @classmethod
    def register(cls, backend: str) -> Callable[[type[CheckpointEngine]], type[CheckpointEngine]]:
        def wrapped(engine: type[CheckpointEngine]) -> type[CheckpointEngine]:
            cls._engines[backend] = engine
            return engine

        return wrapped

    @classmethod
    def get(cls, backend: str) -> type[CheckpointEngine]:
        return cls._engines[backend]

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> CheckpointEngine:
        return cls.get(backend)(*args, **kwargs)
