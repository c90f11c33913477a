"""Refit vLLM engines in place through a weight transfer backend, driven by a trainer or following by themselves.

    vllm serve MODEL --weight-transfer-config '{"backend": "refitd"}'
    ... --additional-config '{"refitd": {"model": "policy", "replica": "a", "follow": true}}'

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). docs/vllm.md has the rest.
"""

from __future__ import annotations

BACKEND = "refitd"


def register() -> None:
    """Register the backend in this vLLM process; an untested vLLM is refused only when the backend is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from refitd.adapters.vllm import seams

    if BACKEND in WeightTransferEngineFactory._registry:
        return  # vLLM may load its plugins several times in a process
    WeightTransferEngineFactory.register_engine(BACKEND, "refitd.adapters.vllm.engine", "RefitdEngine")
    WeightTransferTrainerFactory.register_engine(BACKEND, "refitd.adapters.vllm.trainer", "RefitdTrainer")
    try:
        seams.open_seams()
    except (ImportError, AttributeError) as exc:
        seams.missing.append(str(exc))
