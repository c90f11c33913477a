#!/bin/sh
# Train with verl's separate_async GRPO trainer; its weights reach the rollout workers through refitd instead of NCCL.
#
# It needs GPUs: half of them train, half of them answer. It has been checked against verl 0.9.1's own configuration, and
# has not run as a whole (docs/verl.md says what has). Run on each node, then this on Ray's head:
#
#     refitd serve --standalone &     # several nodes: docs/operate.md
#     examples/verl_grpo.sh QWEN2.5-FOLDER TRAIN.parquet TEST.parquet
set -eu
[ $# -ge 3 ] || { echo "usage: $0 MODEL TRAIN.parquet TEST.parquet [verl's overrides]" >&2; exit 2; }
model=$1 train=$2 test=$3
shift 3
gpus=${GPUS:-2}
exec python3 -m verl.trainer.main_ppo \
    actor_rollout_ref.rollout.checkpoint_engine.backend=refitd \
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=refitd.adapters.verl \
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.refitd.timeout=900 \
    trainer.v1.trainer_mode=separate_async \
    trainer.v1.separate_async.parameter_sync_step=4 \
    transfer_queue.enable=True \
    algorithm.adv_estimator=grpo \
    data.train_files="$train" \
    data.val_files="$test" \
    data.return_raw_chat=True \
    data.train_batch_size=256 \
    data.gen_batch_size=1 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.nnodes=1 \
    actor_rollout_ref.rollout.n_gpus_per_node="$gpus" \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node="$gpus" \
    trainer.logger=console \
    "$@"
