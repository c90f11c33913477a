"""Start an SGLang engine, change the weights of its checkpoint, and refit the engine."""

# It needs a GPU and SGLang 0.5 (pip install "refitd[sglang]"). It has not run with a whole engine;
# docs/sglang.md lists the tests.
#
#     refitd serve --standalone &
#     python examples/sglang_trainer.py FOLDER

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import refitd
from refitd.adapters.sglang import LOADER, drive


def train(engine: Any, client: refitd.Client, model: torch.nn.Module, folder: str, versions: int) -> None:
    """Give `engine` so many versions of `model`; each is live in all of its ranks when the next is made."""
    source = client.register_source("policy", model)
    first = source.next_version
    for version in range(first, first + versions):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)  # a trainer's step
        source.publish(version)
        report = drive(engine, client, version, replica="a", checkpoint=folder)
        print(f"version {version} is live after {report.total_s:.3f} s", flush=True)


def main() -> None:
    """Give one engine some versions, and let it answer with each."""
    import sglang

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a checkpoint in Hugging Face's format")
    parser.add_argument("--versions", type=int, default=3)
    options = parser.parse_args()
    engine = sglang.Engine(model_path=options.folder, custom_weight_loader=[LOADER])
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16)
    with refitd.connect(name="trainer") as client:
        train(engine, client, model, options.folder, options.versions)
    print(engine.generate("The capital of France is")["text"])
    engine.shutdown()


if __name__ == "__main__":
    main()
