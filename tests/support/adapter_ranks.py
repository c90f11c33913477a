"""One process of a job (tests/support/adapters.py): a trainer rank or an engine, with one of refitd's adapters.

vLLM and SGLang are stand-ins (tests/support/engine_stand_ins.py); verl is a stand-in unless it is installed. Each
engine keeps what it has loaded, or has a model whose loader fuses two tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import io
import json
import logging
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import refitd
from refitd.testing import eventually
from refitd.testing.actors import Mailroom
from tests.support.engine_stand_ins import retry_soon, sglang_modules, vllm_config, vllm_modules

SHAPES = {
    "embed": ((300, 64), torch.bfloat16),
    "q": ((64, 64), torch.bfloat16),
    "k": ((32, 64), torch.bfloat16),
    "scale": ((), torch.float32),
    "mlp": ((128, 64), torch.float32),
    "norm": ((64,), torch.bfloat16),
}
BUCKET = 30_000  # bytes
WAIT_S = 60.0
STEP_S = 0.01

Tensors = dict[str, torch.Tensor]


def values(step: int) -> Tensors:
    """Return the tensors of a trainer's step; step 0 is the checkpoint that engines start with."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def exported(step: int, fault: str = "") -> Iterator[Any]:
    """Yield a step's tensors as a trainer exports them: each is overwritten when the next one is requested."""
    for name, tensor in values(step).items():
        if fault == "none" or (fault == "one" and name != "embed"):
            return
        match fault if name == "mlp" else "":
            case "raises":
                raise RuntimeError("the gather failed")
            case "dies":
                os._exit(3)
            case "slow":
                time.sleep(1.0)
            case "missing":
                continue
            case "shape":
                yield name, tensor.t()
                continue
            case "twice":
                yield name, tensor
            case "unknown":
                yield "other", tensor
            case "no pair":
                yield tensor
        yield name, tensor
        tensor.fill_(-1)


def equal(found: Tensors, step: int) -> bool:
    wanted = values(step)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


class Host:
    """An actor that becomes a rank; a call returns (value, error text), and one of the two is empty."""

    def __init__(self, number: int, room: Mailroom) -> None:
        torch.set_num_threads(1)
        self.rank: Any = None

    def become(self, kind: str, *given: Any, **named: Any) -> None:
        self.rank = globals()[kind](*given, **named)

    def call(self, method: str, *given: Any, **named: Any) -> tuple[Any, str]:
        try:
            return getattr(self.rank, method)(*given, **named), ""
        except Exception as exc:
            return None, f"{type(exc).__name__}: {exc}"


def real_verl() -> str:
    """Return the version of verl, "" for the stand-in, which this makes importable."""
    try:
        return importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        if (path := str(Path(__file__).parent / "verl_stand_in")) not in sys.path:
            sys.path.insert(0, path)
        return ""


# --- frameworks that stream tensors from workers to workers ---------------------------------------------------


class Verl:
    """A worker of verl's trainer ("master" or "walker") or of its rollout."""

    def __init__(self, directory: str, role: str) -> None:
        real_verl()
        adapter = importlib.import_module("refitd.adapters.verl")
        self._loaded: Tensors = {}
        self._engine = adapter.RefitdCheckpointEngine(
            bucket_size=BUCKET, is_master=role == "master", runtime_dir=directory, timeout=WAIT_S
        )

    def prepare(self) -> Any:
        return self._engine.prepare()

    def build(self, trainers: int, rollouts: int, metadata: list[Any]) -> Any:
        return type(self._engine).build_topology(trainers, rollouts, metadata)

    def init(self, given: dict[str, Any]) -> None:
        self._engine.init_process_group(**given)

    def send(self, step: int, fault: str) -> None:
        asyncio.run(self._engine.send_weights(exported(step, fault), global_steps=step))

    def receive(self, step: int, fault: str) -> None:
        async def received() -> Tensors:
            found = {}
            async for name, tensor in self._engine.receive_weights(global_steps=step):
                if fault:
                    raise RuntimeError("the loader failed")
                found[name] = tensor.clone()
            return found

        self._loaded = asyncio.run(received())

    def finalize(self) -> None:
        self._engine.finalize()

    def close(self) -> None:
        self._engine.close()

    def holds(self, step: int) -> bool:
        return equal(self._loaded, step)


class NemoRl:
    """A policy rank or a generation rank of NeMo-RL."""

    def __init__(self, directory: str) -> None:
        from refitd.adapters.nemo_rl import RefitdTransport

        self._loaded: Tensors = {}
        self._engine = RefitdTransport(bucket_size=BUCKET, runtime_dir=directory, timeout_s=WAIT_S)

    def prepare(self) -> Any:
        return self._engine.prepare()

    def join(self, **given: Any) -> None:
        if "worker_rank" in given:
            self._engine.init_policy_process_group(**given)
        else:
            self._engine.init_rollout_process_group(**given)

    def send(self, step: int, fault: str) -> None:
        asyncio.run(self._engine.send_weights(exported(step, fault)))

    def receive(self, step: int, fault: str) -> None:
        async def received() -> Tensors:
            found = {}
            async for batch in self._engine.receive_weight_batches():
                if fault:
                    raise RuntimeError("the loader failed")
                assert sum(tensor.nbytes for _, tensor in batch) <= BUCKET or len(batch) == 1
                found.update((name, tensor.clone()) for name, tensor in batch)
            return found

        self._loaded = asyncio.run(received())

    def close(self) -> None:
        self._engine.finalize()

    def holds(self, step: int) -> bool:
        return equal(self._loaded, step)


# --- trainers ---------------------------------------------------------------------------------------------------


def post(server: str, path: str, body: Any) -> Any:
    request = urllib.request.Request(f"{server}/{path}", json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as exc:
        raise RuntimeError(exc.read().decode()) from exc


class TrlTrainer:
    """TRL's trainer."""

    def __init__(self, directory: str, servers: list[str]) -> None:
        from refitd.adapters.trl import RefitdWeightTransfer

        self._transfer = RefitdWeightTransfer(servers, runtime_dir=directory, timeout=WAIT_S)
        self._transfer.init_weight_transfer()

    def send(self, step: int, fault: str) -> None:
        self._transfer.pause()
        try:
            self._transfer.send_weights(exported(step, fault))
        finally:
            self._transfer.resume()

    def close(self) -> None:
        self._transfer.destroy()


class VllmTrainer:
    """A trainer that switches vLLM's weight transfer backend to refitd."""

    def __init__(self, directory: str, servers: list[str]) -> None:
        sys.modules.update(vllm_modules(values(0)))
        adapter = importlib.import_module("refitd.adapters.vllm.trainer")
        self._servers, self._weights = servers, values(0)
        info = adapter.RefitdTrainerInitInfo(tensors=self._weights, runtime_dir=directory, wait_s=WAIT_S)
        self._trainer = adapter.RefitdTrainer.trainer_init(info, client=self)

    def init_weight_transfer_engine(self, settings: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": settings})

    def start_weight_update(self) -> None:
        self._post("start_weight_update", {})

    def update_weights(self, given: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": given})

    def finish_weight_update(self) -> None:
        self._post("finish_weight_update", {})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        for server in self._servers:
            post(server, path, body)

    def send(self, step: int, fault: str) -> None:
        for name, tensor in values(step).items():
            self._weights[name].copy_(tensor)
        self._trainer.send_weights()

    def close(self) -> None:
        self._trainer.shutdown()


class Trainer:
    """A trainer that registers its tensors, for engines that follow; with servers, it drives SGLang's."""

    def __init__(self, directory: str, servers: list[str], checkpoint: str) -> None:
        self._settings = {"replica": "a", "runtime_dir": directory, "checkpoint": checkpoint}
        self._servers, self._weights = servers, values(0)
        self._client = refitd.connect(directory, name="trainer")
        self._source = self._client.register_source("policy", self._weights)

    def send(self, step: int, fault: str) -> None:
        for name, tensor in values(step).items():
            self._weights[name].copy_(tensor)
        self._source.publish(version := self._source.next_version)
        if not self._servers:
            self._client.swap("policy", version, timeout=WAIT_S, queue=True)
            return
        from refitd.adapters.sglang import drive

        drive(self, self._client, version, **self._settings)

    def begin_weight_update(self) -> tuple[bool, str]:
        return True, "Success"

    def update_weights_from_tensor(self, named: list[tuple[str, torch.Tensor]], load_format: str) -> tuple[bool, str]:
        """Forward to all schedulers, as `sglang.Engine` does."""
        for server in self._servers:
            succeeded, text = post(server, load_format, [(name, tensor.tolist()) for name, tensor in named])
            if not succeeded:
                return False, text
        return True, "Success"

    def end_weight_update(self) -> tuple[bool, str]:
        return True, "Success"

    def close(self) -> None:
        self._source.close()
        self._client.close()


# --- engines that load a model ------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A model with its loader, as engines have; it starts with the checkpoint, step 0."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in values(0).items():
            if name not in ("q", "k"):
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.qk = torch.nn.Parameter(torch.zeros(96, 64, dtype=torch.bfloat16), requires_grad=False)
        self.load_weights(values(0).items())

    def load_weights(self, weights: Any) -> None:
        held = dict(self.named_parameters())
        for name, weight in weights:
            {"q": self.qk[:64], "k": self.qk[64:], **held}[name].data.copy_(weight)

    def whole(self) -> Tensors:
        held = {name: tensor.data.clone() for name, tensor in self.named_parameters()}
        qk = held.pop("qk")
        return {**held, "q": qk[:64], "k": qk[64:]}


class Engine:
    """Computes steps on a thread, each of which must see one version; answers HTTP requests on others."""

    def __init__(self, port: int) -> None:
        self.model = Model()
        self.fault = self.is_busy = False
        self.wrong: list[str] = []
        self._log = io.StringIO()
        logging.getLogger().addHandler(logging.StreamHandler(self._log))
        self._stopped = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        if port:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
            self._threads.append(threading.Thread(target=self._server.serve_forever, daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Offer a commit point, and let no version go live during the block."""
        raise NotImplementedError

    def answer(self, path: str, body: Any) -> Any:
        """Answer a POST."""
        raise NotImplementedError

    def fail_once(self) -> None:
        """Make the next commit fail: a driven engine refuses it, a following one is busy until `recover`."""
        self.fault = True
        if self._server is None:
            eventually(lambda: self.is_busy, "the engine is in a step that does not end")

    def recover(self) -> None:
        self.fault = False

    def wait_until_refused(self) -> None:
        """Return once the engine has logged that it is not refitted."""
        eventually(lambda: "is not refitted" in self._log.getvalue(), "the engine is refused")

    def holds(self, step: int) -> bool:
        assert not self.wrong, self.wrong
        return equal(self.model.whole(), step)

    def close(self) -> None:
        self._stopped.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(STEP_S):
            try:
                with self.step():
                    before = self.model.whole()
                    while self.fault and self._server is None:
                        self.is_busy = True
                        time.sleep(STEP_S)
                    self.is_busy = False
                    time.sleep(STEP_S)
                    if any(not torch.equal(tensor, before[name]) for name, tensor in self.model.whole().items()):
                        self.wrong.append("the weights changed during a step")
            except Exception as exc:
                self.wrong.append(f"{type(exc).__name__}: {exc}")
                return

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200, None)  # /health

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    self._reply(200, engine.answer(self.path.strip("/").partition("?")[0], body))
                except Exception as exc:
                    self._reply(500, f"{type(exc).__name__}: {exc}")

            def _reply(self, status: int, said: Any) -> None:
                data = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Print no line for each request."""

        return Handler


class VllmEngine(Engine):
    """A vLLM worker, driven over HTTP or following."""

    def __init__(self, directory: str, replica: str, port: int) -> None:
        sys.modules.update(vllm_modules(values(0)))
        adapter: Any = importlib.import_module("refitd.adapters.vllm.engine")
        retry_soon()
        settings = {"runtime_dir": directory, "replica": replica, "follow": not port}
        super().__init__(port)
        self._engine: Any = adapter.RefitdEngine(None, vllm_config(settings), torch.device("cpu"), self.model)
        self.start()

    def step(self) -> contextlib.AbstractContextManager[None]:
        step: contextlib.AbstractContextManager[None] = self._engine.refitd_step()
        return step

    def answer(self, path: str, body: Any) -> Any:
        match path:
            case "init_weight_transfer_engine":
                self._engine.init_transfer_engine(self._engine.parse_init_info(body["init_info"]))
            case "start_weight_update":
                self._engine.start_weight_update()
            case "update_weights":
                if self.fault:
                    raise RuntimeError("the engine is out of memory")
                self._engine.update_weights(body["update_info"])
            case "finish_weight_update":
                self._engine.finish_weight_update()

    def close(self) -> None:
        super().close()
        self._engine.shutdown()


class SglangEngine(Engine):
    """A scheduler of SGLang, driven through a custom loader or following as a plugin."""

    def __init__(self, directory: str, replica: str, port: int, checkpoint: str) -> None:
        modules, hooks = sglang_modules(ord(replica) - ord("a"))
        sys.modules.update(modules)
        from refitd.adapters import sglang

        retry_soon()
        self._sglang, self._hooks, self._turn = sglang, hooks, threading.Lock()
        if not port:
            os.environ[sglang.SETTINGS] = json.dumps({"runtime_dir": directory, "replica": "a"})
            sglang.register()
        super().__init__(port)
        self._scheduler = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self.model)),
            server_args=SimpleNamespace(model_path=checkpoint, disable_radix_cache=True),
        )
        self.start()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        with self._turn:  # a scheduler handles requests between two batches
            for hook in [*self._hooks.values()]:
                hook(self._scheduler)
            yield

    def answer(self, path: str, body: Any) -> Any:
        assert path == self._sglang.LOADER
        sent = dict(body)
        kinds = {"refitd.settings": torch.uint8, "refitd.version": torch.int64}
        if self.fault and sent["refitd.version"][0] >= 0:
            return False, "the engine is out of memory"
        with self._turn:
            try:
                self._sglang.take_over(self.model, [(n, torch.tensor(given, dtype=kinds[n])) for n, given in body])
            except refitd.RefitdError as exc:
                return False, str(exc)
        return True, "Success"
