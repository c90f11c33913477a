"""Train with TRL's AsyncGRPOTrainer; its weights reach vLLM servers through refitd instead of NCCL."""

# It needs TRL (pip install "refitd[trl]"), a folder with a model and its tokenizer, and a GPU for its attention
# (`scripts/try-engines --only async-grpo` runs it on a CPU, with another kernel).
#
#     refitd serve --standalone &
#     VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --weight-transfer-config '{"backend": "refitd"}' &
#     python examples/trl_trainer.py FOLDER

import argparse
from typing import Any

import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from refitd.adapters.trl import RefitdWeightTransfer


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def build(folder: str, server: str, transfer: RefitdWeightTransfer, **config: Any) -> AsyncGRPOTrainer:
    """Return a trainer that rewards even tokens; `config` is TRL's."""
    prompts = [[{"role": "user", "content": f"w{i} w{i + 1}"}] for i in range(32)]
    return AsyncGRPOTrainer(
        model=folder,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=AsyncGRPOConfig(
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=12,
            weight_sync_steps=1,
            vllm_server_base_url=server,
            report_to="none",
            **config,
        ),
        weight_transfer=transfer,
    )


def main() -> None:
    """Train against one server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="the checkpoint that the server was started with")
    parser.add_argument("--server", default="http://localhost:8000")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    transfer = RefitdWeightTransfer(options.server, cast=torch.bfloat16)
    build(options.folder, options.server, transfer, output_dir="trl-output", max_steps=options.steps).train()


if __name__ == "__main__":
    main()
