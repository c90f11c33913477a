"""Tell vLLM's EngineCore which version each batch was computed with: for its outputs, and for cached prefixes.

    EngineCore   schedule a batch: number it; if another version is live, forget cached prefixes
    rank 0       commit; forward pass: note the version of the batch
    EngineCore   outputs of the batch: report its version (`RequestOutput.weight_versions`)

EngineCore and its workers share these numbers in memory. EngineCore hashes the blocks of a prompt from a root. Another
root for each version makes prefixes of older versions unreachable; running requests keep theirs.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
from collections.abc import Callable
from typing import Any

# Batches whose versions are kept; vLLM has few in flight.
BATCHES = 256


class Versions:
    """The live version, and the versions of the last batches.

    Attributes:
        path: where other processes of this user open it, while this process runs.
    """

    def __init__(self, path: str = "") -> None:
        """Create the numbers, or open another process's."""
        fd = os.open(path, os.O_RDWR) if path else os.memfd_create("refitd-versions")
        nbytes = 8 * (1 + 2 * BATCHES)
        if not path:
            os.ftruncate(fd, nbytes)
        self.path = path or f"/proc/{os.getpid()}/fd/{fd}"
        self._numbers = memoryview(mmap.mmap(fd, nbytes)).cast("q")  # versions plus one; 0: none
        if path:
            os.close(fd)

    def __reduce__(self) -> tuple[type[Versions], tuple[str]]:
        """A copy in another process has the same memory."""
        return Versions, (self.path,)

    @property
    def live(self) -> int | None:
        """The version that the first rank has committed last."""
        return self._numbers[0] - 1 if self._numbers[0] else None

    def committed(self, version: int) -> None:
        """Set the live version."""
        self._numbers[0] = version + 1

    def note(self, batch: int) -> None:
        """Note that a batch is computed with the live version."""
        at = 1 + 2 * (batch % BATCHES)
        self._numbers[at], self._numbers[at + 1] = self._numbers[0], batch

    def of(self, batch: int) -> int | None:
        """Return the version of a batch; None before the first version, and for batches without computed tokens."""
        at = 1 + 2 * (batch % BATCHES)
        number, noted = self._numbers[at], self._numbers[at + 1]
        return number - 1 if number and noted == batch else None


def share(config: Any) -> None:
    """Create the numbers, before EngineCore's workers get their copies of its configuration."""
    config.refitd_versions = Versions()


def of(config: Any) -> Versions | None:
    """Return the numbers of the engine with this configuration; None if its EngineCore does not share them."""
    found: Versions | None = getattr(config, "refitd_versions", None)
    return found


def open_seams(*, reports: bool) -> None:
    """Patch EngineCore and its scheduler; with a vLLM that lacks one of these functions, no versions are shared.

    Args:
        reports: this vLLM's outputs name a version.

    Raises:
        ImportError, AttributeError: this vLLM lacks one.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    def forget(root: bytes) -> None:
        kv_cache_utils.NONE_HASH = root  # read at each hash of a first block

    def root() -> object:
        return getattr(kv_cache_utils, "NONE_HASH", None)  # vLLM sets it if it caches prefixes

    patched: list[tuple[Any, str, Callable[..., Any]]] = [
        (Scheduler, "schedule", functools.partial(_numbered, forget=forget)),
        (Scheduler, "add_request", _rooted),
        (Request, "update_block_hashes", functools.partial(_from_root, root=root)),
    ]
    if reports:
        patched.append((EngineCore, "capture_iteration_details", _remembered))
        patched.append((EngineCore, "_attach_weight_version", _reported))
    made = [(kind, name, wrap(getattr(kind, name))) for kind, name, wrap in patched]
    for kind, name, wrapped in made:
        setattr(kind, name, wrapped)


def _numbered(schedule: Callable[..., Any], forget: Callable[[bytes], None]) -> Callable[..., Any]:
    """Wrap a scheduler: batches have numbers, and a new version's prompts find no prefixes of older ones."""

    @functools.wraps(schedule)
    def scheduled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (versions := of(self.vllm_config)) is None:
            return schedule(self, *args, **kwargs)
        given = self.vllm_config.additional_config
        keeps = isinstance(given, dict) and given.get("refitd", {}).get("keep_prefix_cache", False)
        if (live := versions.live) != getattr(self, "refitd_live", None) and not keeps:
            self.refitd_live = live
            forget(hashlib.sha256(f"refitd {live}".encode()).digest())
            for request in self.waiting:
                _hash_again(request)
            if not self.running:  # running requests use what the encoder has made for them
                self.reset_encoder_cache()
        self.refitd_batches = getattr(self, "refitd_batches", 0) + 1
        found = schedule(self, *args, **kwargs)
        found.refitd_batch = self.refitd_batches
        return found

    return scheduled


def _rooted(add: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a scheduler's queue: vLLM hashes a prompt on another thread, maybe before the last version."""

    @functools.wraps(add)
    def added(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if of(self.vllm_config) is not None:
            _hash_again(request)
        return add(self, request, *args, **kwargs)

    return added


def _hash_again(request: Any) -> None:
    """Hash a request's blocks from the present root, if they were hashed from another one and none is computed."""
    if request.block_hashes and not request.num_computed_tokens and request.refitd_root() != request.refitd_first:
        request.block_hashes = []
        request.update_block_hashes()


def _from_root(update: Callable[..., Any], root: Callable[[], object]) -> Callable[..., Any]:
    """Wrap the hashing of a request's blocks: remember the root of the first one."""

    @functools.wraps(update)
    def hashed(self: Any) -> None:
        if not self.block_hashes:
            self.refitd_root, self.refitd_first = root, root()
        update(self)

    return hashed


def _remembered(capture: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that EngineCore calls with a batch before it takes the batch's outputs."""

    @functools.wraps(capture)
    def captured(self: Any, batch: Any) -> Any:
        self.refitd_batch = getattr(batch, "refitd_batch", None)
        return capture(self, batch)

    return captured


def _reported(attach: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that names the version of a batch's outputs."""

    @functools.wraps(attach)
    def attached(self: Any, outputs: Any) -> Any:
        versions, batch = of(self.vllm_config), getattr(self, "refitd_batch", None)
        if versions is not None and batch is not None and (version := versions.of(batch)) is not None:
            self._weight_version = str(version)
        return attach(self, outputs)

    return attached
