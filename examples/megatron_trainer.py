"""Send the weights of a Megatron-Core GPTModel, tensor and pipeline parallel, to a Hugging Face model."""

# Needs megatron-core and transformers (`pip install 'refitd[megatron]'`). It runs on CPUs, where Megatron does not
# train: a step only scales the weights.
#
#     refitd serve --standalone --config configs/laptop.toml &
#     python examples/megatron_trainer.py --engine &
#     torchrun --standalone --nproc-per-node 4 examples/megatron_trainer.py --tp 2 --pp 2

import argparse

import torch
import torch.distributed as dist
import transformers

import refitd
from refitd.names import megatron_to_hf

CONFIG = transformers.LlamaConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)
PADDED_VOCABULARY = 1024  # Megatron's embeddings have more rows than the model; refitd does not offer them


def build(tp: int, pp: int) -> torch.nn.Module:
    """Return this rank's part of the model, as any Megatron trainer builds it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tp, pp)
    config = TransformerConfig(
        num_layers=CONFIG.num_hidden_layers,
        hidden_size=CONFIG.hidden_size,
        ffn_hidden_size=CONFIG.intermediate_size,
        num_attention_heads=CONFIG.num_attention_heads,
        num_query_groups=CONFIG.num_key_value_heads,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=PADDED_VOCABULARY,
        max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def train(tp: int, pp: int, steps: int) -> None:
    """Publish every step's weights and swap them in."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = build(tp, pp)
    with refitd.connect(name=f"trainer-{rank}") as client:
        source = client.register_source("policy", model, rank=rank, world_size=world_size, names=megatron_to_hf(CONFIG))
        first = source.next_version
        for version in range(first, first + steps):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            source.publish(version)
            dist.barrier()  # a version is complete when every rank has published it
            if rank == 0:
                client.swap("policy", version, timeout=60, wait=60)
                print(f"trainer: version {version}", flush=True)
        dist.barrier()  # closing a source withdraws its versions, so wait for the last swap
        source.close()
    dist.destroy_process_group()


def serve(steps: int) -> None:
    """Serve a Hugging Face model; print its answer after each version."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG)
    with refitd.connect(name="engine") as client:
        target = client.register_target("policy", model, replica="hf")
        for _ in range(steps):
            version = target.wait((target.version or 0) + 1, timeout=120)
            with torch.no_grad():
                answer = int(model(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax())
            print(f"engine: version {version} answers {answer}", flush=True)
        target.close()


def main() -> None:
    """Train, or serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    said = parser.parse_args()
    if said.engine:
        serve(said.steps)
    else:
        train(said.tp, said.pp, said.steps)


if __name__ == "__main__":
    main()
