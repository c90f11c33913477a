"""What a vLLM engine takes and refuses, with stand-ins for vLLM; scripts/try-engines runs it with vLLM."""

from __future__ import annotations

import contextlib
import importlib
import logging
import subprocess
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch

import refitd
from refitd.adapters.engine_checks import Offered, check_covered, check_shapes

Init, Update = TypeVar("Init"), TypeVar("Update")


class Base(Generic[Init, Update]):
    """As vLLM's WeightTransferEngine."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.vllm_config, self.model = vllm_config, model
        self.model_config, self.parallel_config = vllm_config.model_config, vllm_config.parallel_config


class Info:
    """As vLLM's dataclasses of settings."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    held: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.config": {"VllmConfig": Info, "set_current_vllm_config": contextlib.nullcontext},
        "vllm.config.weight_transfer": {"WeightTransferConfig": Info},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": {"shm_broadcast": SimpleNamespace(sched_yield=None)},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": Base,
            "WeightTransferInitInfo": Info,
            "WeightTransferUpdateInfo": Info,
        },
    }
    for name, values in held.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "refitd.adapters.vllm.engine", raising=False)
    module = importlib.import_module("refitd.adapters.vllm.engine")
    yield module
    sys.modules.pop("refitd.adapters.vllm.engine", None)


def made(engine: Any, *, tied: bool = False, stages: int = 1, experts: bool = False) -> Any:
    config = SimpleNamespace(
        additional_config={"refitd": {}},
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(tie_word_embeddings=tied), quantization=None, dtype=torch.bfloat16
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, enable_expert_parallel=experts),
    )
    return engine.RefitdEngine(None, config, torch.device("cpu"), torch.nn.Module())


def trace(*unused: str) -> refitd.LoaderTrace:
    return refitd.LoaderTrace(metadata={}, computed={}, untouched=(), unused=unused)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"followw": True}, "unknown settings followw; known: adopt, check"),
        ({"follow": "false"}, r"follow is 'false' \(str\), expected true or false"),
        ({"check": 0}, r"check is 0 \(int\), expected true or false"),
        ({"replica": 5}, r"replica is 5 \(int\), expected a text"),
        ({"timeout_s": True}, r"timeout_s is True \(bool\), expected a number"),
        ({"timeout_s": 5}, ""),
    ],
)
def test_a_setting_of_another_type_is_refused_where_the_engine_starts(
    engine: Any, settings: dict[str, Any], says: str
) -> None:
    """Not in what follows, which tries again for ever; and a text would be taken for true."""
    one = made(engine)
    with pytest.raises(ValueError, match=says) if says else contextlib.nullcontext():
        one.parse_init_info(settings)


def test_an_output_layer_that_a_tied_engine_would_drop_is_refused(engine: Any) -> None:
    with pytest.raises(refitd.RefusedError, match=r"offers lm_head\.weight, and this engine's .* tied .* register the"):
        made(engine, tied=True)._check(trace("lm_head.weight"), {})
    made(engine)._check(trace("lm_head.weight"), {})


def test_a_tensor_that_the_loader_would_cut_is_refused() -> None:
    """vLLM's loader takes the first rows of a projection with more heads than the engine has."""
    own: Offered = {"q_proj.weight": ((4, 3), torch.float32), "norm.weight": ((3,), torch.float32)}
    check_shapes(own, {**own, "more": ((2,), torch.int8)})
    with pytest.raises(refitd.RefusedError, match=r"q_proj\.weight: the trainer offers \[8, 3\], .* has \[4, 3\]"):
        check_shapes(own, {**own, "q_proj.weight": ((8, 3), torch.float32)})


def test_a_trainer_less_exact_than_engine_and_checkpoint_is_said_by_name(caplog: pytest.LogCaptureFixture) -> None:
    gate, up = torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.bfloat16)
    own: Offered = {"gate": ((4, 3), torch.float32), "up": ((4, 3), torch.float32)}

    def checked(dtype: torch.dtype) -> str:
        caplog.clear()
        offered = dict.fromkeys(own, ((4, 3), dtype))
        params = {"gate": gate, "up": up}
        load = lambda weights: [params[name].copy_(weight) for name, weight in weights]  # noqa: E731
        check_covered(refitd.trace_loader(params, load, offered), params, own)
        return caplog.text

    assert checked(torch.float32) == ""
    assert "offers gate in bfloat16, and this engine keeps it in float32 (gate)" in (said := checked(torch.bfloat16))
    assert "1 such tensors" in said


def test_weights_that_the_trainer_calls_otherwise_are_refused_with_the_nearest_names() -> None:
    offers = [f"net.layers.{n}.mlp.down_proj.weight" for n in range(7)]
    left = refitd.LoaderTrace({}, {}, ("model.layers.6.mlp.down_proj.weight", "none"), ("norm.bias", *offers))
    params = {"model.layers.6.mlp.down_proj.weight": torch.zeros(2), "none": torch.zeros(0)}
    with pytest.raises(refitd.RefusedError, match=r"goes to 1 weights of the engine: model\.layers\.6") as refused:
        check_covered(left, params)
    close = str(refused.value).partition("(nearest first) ")[2].split(", ")
    assert close[0] == offers[6] and len(close) == 5 and "norm.bias" not in close
    with pytest.raises(refitd.RefusedError, match="of what it offers, the engine takes all"):
        check_covered(refitd.LoaderTrace({}, {}, ("none",), ()), {"none": torch.zeros(1)})


def test_tensors_that_an_engine_takes_nothing_of_are_said(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for settings in ({"stages": 2}, {"experts": True}):  # other ranks take them
            made(engine, **settings)._check(trace("layers.1.w"), {})
        assert not caplog.records
        made(engine)._check(trace("model.layers.61.eh_proj.weight"), {})
    assert "takes nothing of 1 tensors that the trainer offers: model.layers.61.eh_proj.weight" in caplog.text


def test_an_engine_that_is_refused_tries_again(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine that has its name may go, and a trainer with other tensors may come."""
    monkeypatch.setattr(engine, "REFUSED_AGAIN_S", 0.0)
    one, tries, registered = made(engine), [], threading.Event()

    def bind(info: Any) -> None:
        tries.append(info)
        if len(tries) < 4:
            raise refitd.RefusedError("replica 'a' is taken")
        one._stopped.set()
        registered.set()

    monkeypatch.setattr(one, "_bind", bind)
    monkeypatch.setattr(one, "_commit_when_idle", lambda: None)
    one._run(None)
    assert registered.is_set() and len(tries) == 4
    said = [record.getMessage() for record in caplog.records if "not refitted" in record.getMessage()]
    assert said == ["refitd: this engine is not refitted: replica 'a' is taken; it serves what it has, and tries again"]


def test_an_engine_that_waits_says_each_reason_once_in_vllms_log(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may wait for days, and tries every 2 s. vLLM shows what its own loggers say, and their INFO."""
    monkeypatch.setattr(engine, "TRY_AGAIN_S", 0.0)
    one = made(engine)
    tries = iter(
        [
            *[refitd.PeerLost("no refitd daemon is running in /run/x")] * 3,
            *[refitd.DeadlineExceeded("model 'policy': no tensors are offered; registered models: actor")] * 3,
            None,
            refitd.PeerLost("no refitd daemon is running in /run/x"),
        ]
    )

    def bind(info: Any) -> None:
        found = next(tries, StopIteration)
        if found is StopIteration:
            one._stopped.set()
        elif found is not None:
            raise found

    monkeypatch.setattr(one, "_bind", bind)
    monkeypatch.setattr(one, "_commit_when_idle", lambda: None)
    with caplog.at_level(logging.INFO):
        one._run(None)
    assert {record.name for record in caplog.records} == {"vllm.refitd"}
    lost = "refitd: no refitd daemon is running in /run/x; this engine serves what it has, and tries again"
    waits = "refitd: waiting for a trainer: model 'policy': no tensors are offered; registered models: actor"
    assert [record.getMessage() for record in caplog.records] == [lost, waits, lost]


def test_a_quantised_engine_is_refused_by_the_weights_name_and_with_what_remains(engine: Any) -> None:
    one = made(engine)
    one.model_config.quantization = "compressed-tensors"
    packed = refitd.LoaderTrace(metadata={}, computed={"q_proj.weight": ("q",)}, untouched=(), unused=())
    says = r"quantised \(compressed-tensors\).*: q_proj\.weight; serve .* or publish a LoRA adapter alone"
    with pytest.raises(refitd.RefusedError, match=says), one._if_quantised():
        one._check(packed, {"q_proj.weight": torch.zeros(2)})
    one.model_config.quantization = None
    with pytest.raises(refitd.RefusedError, match=r"^1 weights are no copies"), one._if_quantised():
        one._check(packed, {"q_proj.weight": torch.zeros(2)})


def test_an_engine_whose_server_has_ended_computes_nothing_more(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    lifeline = refitd.Lifeline({server.pid: "the API server"})
    monkeypatch.setattr(engine, "live_with_server", lambda: lifeline)
    found = made(engine)
    with found.refitd_step():
        pass
    server.kill()
    with pytest.raises(refitd.Orphaned, match="the API server"):
        for _ in range(2000):  # until the lifeline's thread has run
            with found.refitd_step():
                server.poll()
                time.sleep(0.01)
