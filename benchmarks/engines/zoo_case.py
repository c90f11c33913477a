"""Learn and refit one tiny vLLM model.

The truth is a fresh load of the second checkpoint: equal checksums of all weights, and equal log probabilities of a
prompt and an answer. vLLM's own `reload_weights` is compared with it. Each naming is tried: the tensors of the
checkpoint's files, and those of transformers' `state_dict()`.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engines.architectures import ARCHITECTURES, COMMON
from benchmarks.engines.vllm_case import drive

PROMPT = [{"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 8]}]


def forked(run: Callable[..., Any], *given: Any, timeout: float, log: Path | None = None) -> Any:
    """Return what `run` returns in a forked process, which has its own vLLM; its output goes to `log`, if given.

    Raises:
        RuntimeError: it raised, died, or took longer than `timeout` seconds; the error has its last line.
    """
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(theirs, log, run, given))
    process.start()
    theirs.close()
    try:
        if not mine.poll(timeout):
            raise RuntimeError(f"no end after {timeout:.0f} s")
        ok, found = mine.recv()
    except EOFError:
        ok, found = False, "the process died"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    if not ok:
        raise RuntimeError(found)
    return found


def _run(pipe: Any, log: Path | None, run: Callable[..., Any], given: tuple[Any, ...]) -> None:
    os.setpgrp()
    if log is not None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    try:
        pipe.send((True, run(*given)))
    except BaseException as exc:
        traceback.print_exc()
        pipe.send((False, f"{type(exc).__name__}: {exc}"))
    sys.stderr.flush()


def checkpoints(kind: str, dtype: str, folders: list[Path], file: Path) -> None:
    """Write one checkpoint a folder, with other random weights each, and the last one's `state_dict()` to a file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = COMMON | ARCHITECTURES[kind][1]
    config = AutoConfig.for_model(kind, **{name: value for name, value in given.items() if value is not ...})
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        model = model.to(getattr(torch, dtype.partition("+")[0]))
        model.save_pretrained(folder)
        torch.save(model.state_dict(), file)


def run(kind: str, tp: int, dtype: str, directory: Path) -> dict[str, Any]:
    """Return one row: the outcome of each naming, and times; `directory` is a daemon's."""
    import refitd

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(tp > 1))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(i) for i in range(tp))
    work = directory / f"{kind}-{tp}"
    folders = [work / "first", work / "second"]
    try:
        # this process forks, so it computes no tensor before (threads of OpenMP do not survive)
        forked(checkpoints, kind, dtype, folders, work / "state", timeout=300)
        fresh = forked(_fresh, folders[1], directory, tp, dtype, timeout=300)
        with refitd.connect(directory) as client:
            engine = Engine(folders[0], directory, tp, dtype)
            return _compared(client, engine, kind, folders, work / "state", fresh)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fresh(folder: Path, work: Path, tp: int, dtype: str) -> Any:
    return Engine(folder, work, tp, dtype).holds()


def digests(model: Any) -> dict[str, str]:
    """Return a digest of each parameter and buffer."""
    import torch

    held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    whole = {name: tensor.detach().contiguous().reshape(-1).view(torch.uint8) for name, tensor in held.items()}
    return {name: hashlib.sha256(memoryview(tensor.numpy())).hexdigest() for name, tensor in whole.items()}


def shut(worker: Any) -> None:
    """End a worker's registration."""
    worker.weight_transfer_engine.shutdown()


class Engine:
    """A driven vLLM engine in this process."""

    def __init__(self, folder: Path, work: Path, tp: int, dtype: str) -> None:
        from vllm import LLM, SamplingParams

        dtype, _, quantization = dtype.partition("+")
        self.llm = LLM(
            model=str(folder),
            dtype=dtype,
            quantization=quantization or None,
            enforce_eager=True,
            skip_tokenizer_init=True,
            tensor_parallel_size=tp,
            max_model_len=128,
            max_num_seqs=4,
            enable_prefix_caching=False,
            weight_transfer_config={"backend": "refitd"},
            additional_config={"refitd": {"runtime_dir": str(work), "replica": "a", "timeout_s": 30.0}},
        )
        self._greedy = SamplingParams(
            temperature=0, max_tokens=8, detokenize=False, ignore_eos=True, logprobs=1, prompt_logprobs=1
        )

    def holds(self) -> Any:
        """Return checksums of its weights, and log probabilities."""
        (found,) = self.llm.generate(PROMPT, self._greedy, use_tqdm=False)
        said = [*(found.prompt_logprobs or [])[1:], *(found.outputs[0].logprobs or [])]
        told = [{token: one.logprob for token, one in each.items()} for each in said]
        return self.llm.apply_model(digests), told

    def reload(self, folder: Path) -> Any:
        """Reload a checkpoint as vLLM does; return what it holds."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        return self.holds()


def _compared(client: Any, engine: Engine, kind: str, folders: list[Path], file: Path, fresh: Any) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    first, state = engine.holds(), torch.load(file)
    files = {}
    for one in sorted(folders[1].glob("*.safetensors")):
        files |= load_file(one)
    same = {*files} == {*state}
    row: dict[str, Any] = {"same_names": same}
    for naming, tensors in (("on disk", files), ("in memory", state)):
        if naming == "in memory" and same:
            row[naming] = row["on disk"]
            continue
        model = f"{kind}-{naming.replace(' ', '-')}"
        source = client.register_source(model, tensors)
        try:
            version = source.next_version
            started = time.perf_counter()
            engine.llm.init_weight_transfer_engine({"init_info": {"model": model}})
            row.setdefault("bind_s", time.perf_counter() - started)
            source.publish(version)
            row["commit_s"] = drive(client, engine.llm, version, model)["commit_s"]
            row[naming] = _judged(engine.holds(), fresh)
            row["verify"] = str(client.verify(model).outcome)
            engine.llm.collective_rpc(shut)
        except Exception as exc:
            traceback.print_exc()
            row[naming] = f"refused: {type(exc).__name__}: {exc}"[:1500]
        finally:
            source.close()
        back = engine.reload(folders[0])
        row["reload"] = "right" if first != fresh and back == first else "WRONG"
    if row["reload"] == "right":
        row["reload"] = "right" if engine.reload(folders[1]) == fresh else "WRONG"
    return row


def _judged(found: Any, fresh: Any) -> str:
    return "equal" if found == fresh else "WRONG" if found[0] != fresh[0] else "WRONG answers"
