"""A vLLM engine's accepted and refused settings, with fakes for vLLM; scripts/try-engines runs it with vLLM."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import refitd
from refitd.adapters.engines import Learner, Retries, check_covered, check_shapes
from refitd.adapters.streams import Shapes
from tests.support.engine_stand_ins import vllm_config, vllm_modules


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, module in vllm_modules({}).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "refitd.adapters.vllm.engine", raising=False)
    module = importlib.import_module("refitd.adapters.vllm.engine")
    yield module
    sys.modules.pop("refitd.adapters.vllm.engine", None)


class Model(torch.nn.Module):
    """Takes `w` and nothing else; a quantised one has a packed weight, too."""

    def __init__(self, *, is_packed: bool = False) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        if is_packed:
            self.packed = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            if name == "w":
                self.w.data.copy_(weight)


def made(engine: Any, model: torch.nn.Module | None = None, **settings: Any) -> Any:
    config = vllm_config({"check": False, "adopt": False, **settings})
    return engine.RefitdEngine(None, config, torch.device("cpu"), model or Model())


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets what the trainer offers: `w` and others, all of four elements; maybe one memory."""

    def offered(*others: str, tied: bool = False) -> None:
        first = SimpleNamespace(name="w", resolved_name=None, aliases=others if tied else ())
        target = SimpleNamespace(model="policy", flips=False, error=None)
        client = SimpleNamespace(
            tensors=lambda *_, **__: dict.fromkeys(("w", *others), ((4,), torch.float32)),
            describe=lambda _: SimpleNamespace(shards=(SimpleNamespace(tensors=(first,)),)),
            register_target=lambda *_, **__: target,
            status=lambda: SimpleNamespace(models=()),
            close=lambda: None,
        )
        monkeypatch.setattr(refitd, "connect", lambda *_, **__: client)

    return offered


def registered(one: Any) -> None:
    one.init_transfer_engine(one.parse_init_info({}))


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
    """Refuse here, because later steps retry for ever, and a non-empty string would count as true."""
    one = made(engine)
    with pytest.raises(ValueError, match=says) if says else contextlib.nullcontext():
        one.parse_init_info(settings)


def test_an_output_layer_that_a_tied_engine_would_drop_is_refused(engine: Any, offer: Callable[..., None]) -> None:
    for is_tied, trainers_are_tied in ((False, False), (True, True), (True, False)):
        offer("lm_head.weight", tied=trainers_are_tied)
        one = made(engine)
        one.model_config.hf_text_config.tie_word_embeddings = is_tied
        if trainers_are_tied or not is_tied:
            registered(one)
    with pytest.raises(refitd.RefusedError, match=r"offers lm_head\.weight, and this engine's .* tied .* register the"):
        registered(one)


def test_a_tensor_that_the_loader_would_cut_is_refused() -> None:
    """vLLM's loader takes the first rows of a projection with more heads than the engine has."""
    own: Shapes = {"q_proj.weight": ((4, 3), torch.float32), "norm.weight": ((3,), torch.float32)}
    check_shapes(own, {**own, "more": ((2,), torch.int8)})
    with pytest.raises(refitd.RefusedError, match=r"q_proj\.weight: the trainer offers \[8, 3\], .* has \[4, 3\]"):
        check_shapes(own, {**own, "q_proj.weight": ((8, 3), torch.float32)})


def test_a_trainer_less_exact_than_engine_and_checkpoint_is_said_by_name(caplog: pytest.LogCaptureFixture) -> None:
    gate, up = torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.bfloat16)
    own: Shapes = {"gate": ((4, 3), torch.float32), "up": ((4, 3), torch.float32)}

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
    close = str(refused.value).partition("(nearest first) ")[2].partition("; offer")[0].split(", ")
    assert close[0] == offers[6] and len(close) == 5 and "norm.bias" not in close
    with pytest.raises(refitd.RefusedError, match="of what it offers, the engine takes all"):
        check_covered(refitd.LoaderTrace({}, {}, ("none",), ()), {"none": torch.zeros(1)})


def strict(model: Model, weights: Any) -> None:
    for name, weight in weights:
        assert name == "w", f"no parameter named {name}"
        model.w.data.copy_(weight)


def scaled(model: Model, weights: Any) -> None:
    """Load as a plugin does that patches a loader, or a model's own code (trust_remote_code)."""
    for name, weight in weights:
        if name == "w":
            model.w.data.copy_(weight / weight.abs().max())


def kept(model: Model, weights: Any) -> None:
    """Load the first time only."""
    for name, weight in weights:
        if name == "w" and not hasattr(model, "is_loaded"):
            model.w.data.copy_(weight)
            model.is_loaded = True


@pytest.mark.parametrize(
    ("load", "offered", "says"),
    [
        (Model.load_weights, {"v": (4,)}, "goes to 1 weights of the engine: w; .* takes nothing of .* v; offer these"),
        (strict, {"w": (4,), "more": (4,)}, r"'more', which is offered as \[4\] of float32: .*no parameter named more"),
        (Model.load_weights, {"w": (8,)}, r"w: the trainer offers \[8\], the checkpoint .* has \[4\] .* start the"),
    ],
)
def test_bad_offers_are_refused_with_the_tensor_both_sides_and_a_way_out(
    load: Callable[..., None], offered: dict[str, tuple[int, ...]], says: str
) -> None:
    model = Model()
    learner = Learner(model, functools.partial(load, model), lambda: [("w", torch.zeros(4))])
    with pytest.raises(refitd.RefusedError, match=says):
        learner.learn({name: (shape, torch.float32) for name, shape in offered.items()}, 0)
    assert model.w.tolist() == [0.0] * 4


@pytest.mark.parametrize("load", [scaled, kept])
def test_a_loader_that_computes_is_run_in_each_commit_or_refused(load: Callable[..., None]) -> None:
    model, value = Model(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    load(model, [("w", value)])
    learner = Learner(model, functools.partial(load, model), lambda: [("w", value)])
    if load is kept:
        with pytest.raises(refitd.RefusedError, match="w"):
            learner.learn({"w": ((4,), torch.float32)}, 0)
        return
    (group,) = learner.learn({"w": ((4,), torch.float32)}, 0).recomputed
    assert [*group.tensors] == ["w"] and group.what == "the loader"


def test_tensors_that_an_engine_takes_nothing_of_are_said(
    engine: Any, offer: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    offer("eh_proj.weight")
    with caplog.at_level(logging.WARNING):
        for setting, value in (
            ("pipeline_parallel_size", 2),
            ("enable_expert_parallel", True),
        ):  # other ranks take them
            one = made(engine)
            setattr(one.parallel_config, setting, value)
            registered(one)
        assert not caplog.records
        registered(made(engine))
    assert "takes nothing of 1 tensors that the trainer offers: eh_proj.weight" in caplog.text


def test_an_engine_that_waits_or_is_refused_tries_again_and_logs_each_reason_once_in_vllms_log(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may wait for days and retries every 2 s. vLLM shows only its own loggers' lines, and only from INFO."""
    monkeypatch.setattr(Retries, "again_s", 0.0)
    monkeypatch.setattr(Retries, "refused_s", 0.0)
    lost = refitd.PeerLost("no refitd daemon is running in /run/x")
    waits = refitd.DeadlineExceeded("model 'policy': no tensors are offered; registered models: actor")
    refused = refitd.RefusedError("replica 'a' is taken")
    tries, done = iter([*[lost] * 3, *[waits] * 3, *[refused] * 3, lost]), threading.Event()

    def connect(*_: Any, **__: Any) -> Any:
        if (error := next(tries, None)) is not None:
            raise error
        done.set()
        done.wait(0.01)
        raise lost

    monkeypatch.setattr(refitd, "connect", connect)
    with caplog.at_level(logging.INFO):
        one = made(engine, follow=True)
        assert done.wait(30)
        one.shutdown()
    assert {record.name for record in caplog.records} == {"vllm.refitd"}
    assert [record.getMessage() for record in caplog.records] == [
        f"refitd: {lost}; this engine serves what it has, and tries again",
        f"refitd: waiting for a trainer: {waits}",
        f"refitd: this engine is not refitted: {refused}; it serves what it has, and tries again",
        f"refitd: {lost}; this engine serves what it has, and tries again",
    ]


def test_a_quantised_engine_is_refused_by_the_weights_name_and_with_what_remains(
    engine: Any, offer: Callable[..., None]
) -> None:
    offer()
    one = made(engine, Model(is_packed=True))
    with pytest.raises(refitd.RefusedError, match=r"^nothing that the trainer offers goes to 1 weights"):
        registered(one)
    one.model_config.quantization = "compressed-tensors"
    says = r"quantised \(compressed-tensors\): .* has no other, .* offers w\. Serve .* or publish a LoRA .*: packed;"
    with pytest.raises(refitd.RefusedError, match=says):
        registered(one)


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
