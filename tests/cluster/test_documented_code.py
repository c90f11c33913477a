"""The code of README and docs does what the text around it says; `scripts/docs` runs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support.pages import Page, While, all_blocks

pytestmark = [pytest.mark.own_daemon, pytest.mark.slow, pytest.mark.timeout(120)]

# The file that runs each block that is not run here, by page and a text in the block.
ELSEWHERE = {
    ("docs/tutorial.md", "# engine.py"): "tests/cluster/test_tutorial.py",
    ("docs/tutorial.md", "# trainer.py"): "tests/cluster/test_tutorial.py",
    ("docs/fsdp.md", "fully_shard"): "examples/fsdp2_trainer.py",
    ("docs/fsdp.md", "fsdp1_tensors"): "examples/fsdp1_trainer.py",
    ("docs/megatron.md", "model_chunks"): "examples/megatron_trainer.py",
    ("docs/megatron.md", "Padded(words, rows=tokenizer_size)"): "tests/unit/test_mismatches.py",
    ("docs/megatron.md", "halves"): "tests/unit/test_mismatches.py",
    ("docs/recipes.md", "adapter_tensors(model)"): "examples/lora_trainer.py",
    ("docs/recipes.md", "merged(model)"): "tests/cluster/test_peft.py",
    ("docs/recipes.md", "iter(weights)"): "tests/cluster/test_peft.py",
    ("docs/vllm.md", 'cast="bfloat16")'): "examples/vllm_trainer.py",
    ("docs/vllm.md", "WeightTransferTrainerFactory"): "scripts/try-engines",
    ("docs/vllm.md", "AsyncGRPOTrainer"): "examples/trl_trainer.py",
    ("docs/sglang.md", "import sglang"): "tests/cluster/test_sglang_real.py",
    ("docs/operate.md", "refitd_ray.start"): "scripts/try-ray",
    ("docs/recipes.md", ""): "the frameworks that the page names; its table says what was run",
}
GROUPS = "pg_collection=groups)\n\nfor"
RUN = (
    ("README.md", "train_one_step"), ("README.md", "generate_one_token"), ("docs/use.md", GROUPS),
    ("docs/use.md", "described = ["), ("docs/use.md", "source.lend"), ("docs/use.md", "declare_source("),
    ("docs/use.md", "partial=trained"), ("docs/use.md", "publish_checkpoint"), ("docs/use.md", "target.wait(1)"),
    ("docs/use.md", "target.suspend()"), ("docs/use.md", "control_replica"), ("docs/use.md", "client.memory("),
    ("docs/use.md", "trace_loader("),
    ("docs/use.md", "MXFP8Offer"), ("docs/use.md", "testing.Daemon()"), ("docs/use.md", "get_or_create_service"),
    ("docs/use.md", "MXFP8ReshardTransform"), ("docs/fsdp.md", "cast=True"), ("docs/megatron.md", "Fused("),
    ("docs/recipes.md", "stacked_a"),
)  # fmt: skip


def test_every_block_is_run_here_or_elsewhere() -> None:
    for page, block in all_blocks():
        found = [text for at, text in (*RUN, *ELSEWHERE) if at == page and text and text in block]
        if not found and (page, "") in ELSEWHERE:
            continue
        assert len(found) == 1, f"{page}: a block that is run by {found or 'nothing'}:\n{block}"
    for where in ELSEWHERE.values():
        assert where.startswith("the frameworks") or (Path(__file__).parents[2] / where).exists(), where


@pytest.fixture
def fleet(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("REFITD_RUNTIME_DIR", str(daemon.directory))
    found = Fleet(daemon)
    yield found
    found.close()


class Fleet:
    """Pages over one daemon; their clients are closed at the end. `client` is a separate client."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.client = daemon.connect()
        self._pages: list[Page] = []

    def page(self, name: str, **names: Any) -> Page:
        self._pages.append(found := Page(name, **({"client": self.daemon.connect()} | names)))
        return found

    def offers(self, tensors: Any, version: int = 1) -> refitd.Source:
        source = self.client.register_source("policy", tensors)
        source.publish(version)
        return source

    def close(self) -> None:
        for page in self._pages:
            page.names["client"].close()
        self.client.close()


def layer(value: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    found = nn.Linear(8, 8, bias=False, dtype=dtype)
    nn.init.constant_(found.weight, value)
    return found


def trains(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


@pytest.mark.parametrize(
    ("name", "trainer", "engine"),
    [
        ("README.md", "train_one_step", "generate_one_token"),
        ("docs/use.md", GROUPS, "target.wait(1)"),
    ],
)
def test_a_trainer_and_an_engine(fleet: Fleet, name: str, trainer: str, engine: str) -> None:
    stop = threading.Event()
    serving = fleet.page(name, model=layer(), generate_one_token=lambda _: time.sleep(0.01))
    serving.names["serving"] = While(serving.names, 2, stop)
    thread = threading.Thread(target=serving.run, args=(engine,))
    given = fleet.page(name, model=layer(), train_one_step=trains, steps=1, groups=None)
    thread.start()
    try:
        for version in (1, 2):
            given.run(trainer)
            given.names["client"].swap("policy", version, wait=60)
            given.names["client"].close()
        thread.join(60)
    finally:
        stop.set()
        thread.join()
    assert torch.equal(serving.names["model"].weight, given.names["model"].weight)


def test_a_described_shard(fleet: Fleet) -> None:
    found = fleet.page("docs/use.md", tensor=torch.zeros(512, 1024, dtype=torch.bfloat16)).run("described = [")
    assert found.source.next_version == 1


def test_lent_and_produced_versions(fleet: Fleet) -> None:
    model = layer(3.0)
    live = layer()
    target = fleet.client.register_target("policy", live, replica="a")
    with Engine(target):
        page = fleet.page("docs/use.md")
        source = page.names["source"] = page.names["client"].register_source("policy", model)
        tensors = page.run("source.lend").tensors
        assert torch.equal(live.weight, model.weight) and tensors["proj.weight"].shape == (512, 1024)
        source.close()
        page.names |= {"exported": [("weight", (8, 8), torch.float32)], "model": model, "version": 2}
        page.names["export"] = lambda model: ((name, 2 * value) for name, value in model.state_dict().items())
        page.run("declare_source(")
        fleet.client.swap("policy", 2, wait=60)
        assert torch.equal(live.weight, 2 * model.weight)


class Reregistering:
    """A client for a block of alternatives: each registration closes the one before."""

    def __init__(self, client: refitd.Client) -> None:
        self._client = client
        self._open: dict[str, Any] = {}

    def close(self) -> None:
        self._client.close()

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def register(*arguments: Any, **options: Any) -> Any:
            if verb in self._open:
                self._open[verb].close()
            self._open[verb] = getattr(self._client, verb)(*arguments, **options)
            return self._open[verb]

        return register


def test_a_partial_update(fleet: Fleet) -> None:
    model = nn.ModuleDict({"vision": layer(1.0), "language": layer(2.0)})
    model["vision"].requires_grad_(False)
    tensors = {"language.weight": model["language"].weight}
    client = Reregistering(fleet.daemon.connect())
    found = fleet.page("docs/use.md", client=client, model=model, tensors=tensors).run("partial=trained")
    assert found.target.kept == ("vision.weight",)


def test_checkpoints(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.checkpoint as dcp

    monkeypatch.chdir(tmp_path)
    model = layer(4.0)
    dcp.save({"model": model.state_dict(), "step": 40}, checkpoint_id="step-40")
    live = layer()
    with Engine(fleet.client.register_target("policy", live, replica="a")):
        saved = fleet.page("docs/use.md").run("publish_checkpoint").saved
    assert torch.equal(live.weight, model.weight)
    assert saved.version == 1 and (tmp_path / "policy-v7").is_dir()


def test_an_engine_that_sleeps(fleet: Fleet) -> None:
    page = fleet.page("docs/use.md", model=layer(), engine=SimpleNamespace(sleep=lambda: None, wake_up=lambda: None))
    page.names["target"] = target = page.names["client"].register_target("policy", page.names["model"], replica="a")
    fleet.offers(layer(6.0))
    with Engine(target):
        fleet.client.swap("policy", 1, wait=60)
    page.run("target.suspend()")
    assert target.version == 1


def test_a_controller(fleet: Fleet) -> None:
    said: list[str] = []
    engine = SimpleNamespace(
        pause=lambda: said.append("pause"), resume=lambda: said.append("resume"), refuse=lambda: said.append("refuse")
    )  # fmt: skip
    page = fleet.page("docs/use.md", engine=engine)
    ranks = layer()
    controlled = page.names["client"].register_target("policy", ranks, replica="d", controlled=True)
    engine.call_all_ranks = lambda verb: (said.append(verb), controlled.wait(1))
    page.run("control_replica")
    fleet.offers(layer(7.0))
    fleet.client.swap("policy", 1, wait=60)
    assert ranks.weight[0, 0] == 7.0
    eventually(lambda: {*said} == {"pause", "commit", "resume"}, "the engine was resumed")


def test_memory_that_flips(fleet: Fleet) -> None:
    loads = SimpleNamespace(from_pretrained=lambda *_, **__: layer())
    names = {"AutoModelForCausalLM": loads, "path": "", "NAME": ""}
    page = fleet.page("docs/use.md", **names)
    placed = page.run("client.memory(", **{"17 << 30": "1 << 20"})
    assert placed.target.flips and placed.adopted.tensors == 1
    stop = threading.Event()
    following = fleet.page("docs/fsdp.md", **names, generate_one_token=lambda _: time.sleep(0.01))
    following.names["serving"] = While(following.names, 1, stop)
    thread = threading.Thread(target=following.run, args=("cast=True",))
    placed.target.close()
    thread.start()
    fleet.offers(layer(8.0))
    fleet.client.swap("policy", 1, wait=60)
    thread.join(60)
    stop.set()
    assert following.names["model"].weight[0, 0] == 8.0


def test_a_layout_that_a_loader_gives(fleet: Fleet) -> None:
    fleet.offers({"q": torch.full((4, 8), 1.0), "k": torch.full((4, 8), 2.0)})
    params = {"qk": torch.cat([torch.zeros(4, 8), torch.ones(4, 8)])}

    def load_weights(weights: Any) -> None:
        for name, tensor in weights:
            params["qk"][{"q": slice(0, 4), "k": slice(4, 8)}[name]].copy_(tensor)

    engine = SimpleNamespace(load_weights=load_weights)
    checkpoint = [("q", torch.zeros(4, 8)), ("k", torch.ones(4, 8))]
    found = fleet.page("docs/use.md", params=params, engine=engine, checkpoint=checkpoint).run("trace_loader(")
    with Engine(found.target):
        fleet.client.swap("policy", 1, wait=60)
    assert params["qk"][:, 0].tolist() == [1.0] * 4 + [2.0] * 4


def test_mxfp8(fleet: Fleet) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([layer()]), "norm": nn.LayerNorm(64, bias=False)}).bfloat16()
    model["layers"][0].weight = nn.Parameter(torch.randn(32, 64, dtype=torch.bfloat16))
    held = refitd.MXFP8Buffer.empty((32, 64))
    norm, fused = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(1)
    page = fleet.page(
        "docs/use.md", data=held.data, scale=held.scale, norm=norm, fused=fused, fuse=lambda tensor: tensor.fill_(9),
        metadata=None, model=model,
    )  # fmt: skip
    found = page.run("MXFP8Offer")
    found.source.publish(1)
    with Engine(found.target):
        fleet.client.swap("policy", 1, wait=60)
    assert torch.equal(norm, model["norm"].weight) and fused.item() == 9
    assert held.data.float().abs().max() > 0


LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 16, "num_hidden_layers": 2,
}  # fmt: skip


def test_a_map_of_names() -> None:
    found = Page("docs/megatron.md", hf_config=LLAMA).run("Fused(")
    assert {"value_head.weight", "mtp.{rest}"} < found.names.keys()


def test_a_test_of_ones_own() -> None:
    Page("docs/use.md").run("testing.Daemon()").test_an_engine_serves_what_was_published()


def test_a_slot_of_higher_rank(fleet: Fleet) -> None:
    stacked = {"stacked_a": torch.zeros(2, 8, 16), "stacked_b": torch.zeros(2, 16, 8)}
    assert fleet.page("docs/recipes.md", r=4, **stacked).run("stacked_a").target.version is None


def test_without_the_service(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        page = Page("docs/use.md", trainer_model=layer(3.0), engine_model=layer(), steps=2)
        page.run("get_or_create_service")
        assert torch.equal(page.names["engine_model"].weight, page.names["trainer_model"].weight)
        trainer, engine = (nn.ModuleDict({"decoder": nn.Linear(64, 32, bias=False).bfloat16()}) for _ in range(2))
        held = refitd.MXFP8Buffer.empty((32, 64))
        memory = {"engine_memory": lambda name: (held.data, held.scale)}
        Page("docs/use.md", trainer=trainer, engine=engine, names=["weight"], **memory).run("MXFP8ReshardTransform")
        assert held.data.float().abs().max() > 0
    finally:
        torch.distributed.destroy_process_group()
