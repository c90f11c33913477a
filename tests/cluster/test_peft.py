"""LoRA adapters of PEFT through the service: alone, into an engine's slot, and merged, from FSDP2 ranks.

It runs where PEFT is installed (pip install -c constraints.txt ".[peft,test]"), and is skipped elsewhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from refitd.testing import Daemon, Engine

pytestmark = pytest.mark.own_daemon

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from refitd.adapters.peft import adapter_tensors, merged  # noqa: E402  # after the skips

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora_trainer.py"
STEPS = 2


def test_adapters_go_into_a_slot_of_a_larger_rank_and_what_merges_into_an_engine(daemon: Daemon) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, **sizes)

    def base() -> torch.nn.Module:
        torch.manual_seed(0)
        found: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return found

    model = peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    alone, weights, plain = adapter_tensors(model), merged(model, only_trained=True), base()
    # slots of rank 8, as an engine has them for adapters of rank 8 or lower
    slots = {n: torch.zeros((8, t.shape[1]) if "lora_A" in n else (t.shape[0], 8)) for n, t in alone.items()}
    used = {name: slot[:4] if "lora_A" in name else slot[:, :4] for name, slot in slots.items()}
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        adapters = trainer.register_source("policy-lora", alone)
        policy = trainer.declare_source("policy", weights.shapes, metadata=weights.metadata, partial=True)
        slot = engine.register_target("policy-lora", used, replica="a")
        whole = engine.register_target("policy", plain, replica="a", keeps=True)
        assert set(whole.kept) == set(plain.state_dict()) - set(weights.shapes)
        for version in (1, 2):
            with torch.no_grad():
                for tensor in alone.values():
                    tensor.normal_(std=0.3)
            adapters.publish(version)
            policy.publish_from(version, weights)
            with Engine(slot, whole):
                trainer.swap("policy-lora", version, timeout=60)
                report = trainer.swap("policy", version, timeout=60)
            assert report.kept_tensors == len(whole.kept) and len(weights.shapes) == 4
            assert all(torch.equal(used[name], tensor) for name, tensor in alone.items())
            assert all(float(s[4:].sum() if "lora_A" in n else s[:, 4:].sum()) == 0 for n, s in slots.items())
            assert all(torch.equal(plain.state_dict()[name], tensor) for name, tensor in merged(model))


@pytest.mark.slow
def test_the_example_gives_engines_what_two_fsdp2_ranks_train(daemon: Daemon) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("REFITD_")}
    env |= {"REFITD_RUNTIME_DIR": str(daemon.directory), "HF_HUB_OFFLINE": "1"}
    steps = ["--steps", str(STEPS)]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE, *steps]
    command = [sys.executable, EXAMPLE, "--engine", *steps]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None and "registered" in engine.stdout.readline()
            trainer = subprocess.run(run, env=env, capture_output=True, text=True, timeout=200, check=False)
            assert trainer.returncode == 0, trainer.stderr
            took, _ = engine.communicate(timeout=60)
        finally:
            engine.kill()
    gave = re.findall(r"trainer: (version \d+ weights \w+)", trainer.stdout)
    assert len(gave) == len(set(gave)) == STEPS
    for replica in ("slot", "plain"):
        assert re.findall(rf"{replica}: (version \d+ weights \w+)", took) == gave
