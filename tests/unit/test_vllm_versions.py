"""EngineCore names the version of each batch, and prompts find no prefixes of older versions; with fakes for vLLM."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from refitd.adapters.vllm import seams, versions

roots = [b"first"]


class Request:
    """As vLLM's: its blocks are hashed in a chain from a root."""

    def __init__(self, tokens: str) -> None:
        self.tokens, self.block_hashes, self.num_computed_tokens = tokens, list[Any](), 0
        self.update_block_hashes()

    def _update(self) -> None:
        for token in self.tokens[len(self.block_hashes) :]:
            self.block_hashes.append((self.block_hashes[-1] if self.block_hashes else roots[-1], token))

    update_block_hashes = versions._from_root(_update, root=lambda: roots[-1])


class Scheduler:
    def __init__(self, config: Any) -> None:
        self.vllm_config, self.running, self.waiting, self.resets = config, list[Any](), list[Any](), 0

    def reset_encoder_cache(self) -> None:
        self.resets += 1

    schedule = versions._numbered(lambda self: SimpleNamespace(), forget=roots.append)
    add_request = versions._rooted(lambda self, request: self.waiting.append(request))


class Core:
    _weight_version = "default"
    capture = versions._remembered(lambda self, batch: None)
    attach = versions._reported(lambda self, outputs: outputs.append(self._weight_version))


@pytest.fixture
def config() -> Any:
    roots[:] = [b"first"]
    made = SimpleNamespace(additional_config={"refitd": {}})
    versions.share(made)
    return made


def in_a_worker(shared: bytes) -> None:
    worker = pickle.loads(shared)
    worker.committed(7)
    worker.note(3)


def test_a_worker_in_another_process_notes_the_versions_of_batches(config: Any) -> None:
    shared = versions.of(config)
    assert shared is not None and shared.live is None and shared.of(3) is None
    process = multiprocessing.get_context("spawn").Process(target=in_a_worker, args=(pickle.dumps(shared),))
    process.start()
    process.join(60)
    assert (shared.live, shared.of(3), shared.of(3 + versions.BATCHES), shared.of(2)) == (7, 7, None, None)


def test_outputs_have_the_version_that_their_batch_was_computed_with(config: Any) -> None:
    scheduler, core, outputs, shared = Scheduler(config), Core(), list[str](), versions.of(config)
    assert shared is not None
    core.vllm_config = config  # type: ignore[attr-defined]
    batches = [scheduler.schedule() for _ in range(4)]  # in flight together
    for batch, version in zip(batches, (None, 0, None, 5), strict=True):
        if version is not None:
            shared.committed(version)
        if batch is not batches[2]:  # it computed nothing
            shared.note(batch.refitd_batch)
    for batch in batches:
        core.capture(batch)
        core.attach(outputs)
    assert outputs == ["default", "0", "0", "5"]


@pytest.mark.parametrize("keeps", [False, True])
def test_prompts_find_no_prefixes_of_older_versions(config: Any, keeps: bool) -> None:
    config.additional_config["refitd"]["keep_prefix_cache"] = keeps
    scheduler, shared = Scheduler(config), versions.of(config)
    assert shared is not None
    scheduler.schedule()
    waiting, running, late = Request("ab"), Request("ab"), Request("ab")
    cached = {*running.block_hashes}
    running.num_computed_tokens = 2
    scheduler.add_request(waiting)
    scheduler.running = [running]
    shared.committed(1)
    scheduler.schedule()
    scheduler.add_request(late)  # hashed before the commit, on another thread
    new = Request("ab")
    assert [bool(cached & {*one.block_hashes}) for one in (waiting, late, new, running)] == [keeps, keeps, keeps, True]
    assert waiting.block_hashes == late.block_hashes == new.block_hashes
    assert scheduler.resets == 0  # a running request uses the encoder's outputs
    scheduler.running = []
    shared.committed(2)
    scheduler.schedule()
    assert scheduler.resets == (0 if keeps else 1)


def test_an_engine_that_refitd_does_not_refit_is_as_before() -> None:
    scheduler = Scheduler(SimpleNamespace())
    assert vars(scheduler.schedule()) == {}
    scheduler.add_request(request := Request("a"))
    assert scheduler.waiting == [request]


def test_all_answers_are_read_although_some_workers_refuse() -> None:
    def rpc(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **how: Any) -> list[Any]:
        call = method if callable(method) else lambda worker, *given: getattr(worker, method)(*given)
        return [call(worker, *args) for worker in self.workers]

    class Worker:
        def __init__(self, refuses: bool) -> None:
            self.refuses, self.calls = refuses, 0

        def update_weights(self, info: Any) -> str:
            self.calls += 1
            if self.refuses:
                raise ValueError("w: another shape")
            return "done"

    called = functools.partial(
        seams._answered(rpc), SimpleNamespace(vllm_config=refitted(), workers=[Worker(True), Worker(True)])
    )
    with pytest.raises(RuntimeError, match="update_weights failed on 2 of 2 workers: ValueError: w: another shape"):
        called("update_weights", args=(1,))
    assert [worker.calls for worker in called.args[0].workers] == [1, 1]
    called.args[0].workers[0].refuses = called.args[0].workers[1].refuses = False
    assert called("update_weights", args=(1,)) == ["done", "done"]


def refitted() -> Any:
    return SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="refitd"))
