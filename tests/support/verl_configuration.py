"""Compose verl's own trainer configuration with overrides, and print which checkpoint engine it chooses.

    python -m tests.support.verl_configuration OVERRIDE...

The output is JSON: the module that it imports, the engine's class, and its settings.
"""

from __future__ import annotations

import json
import sys

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import import_external_libs


def main() -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=sys.argv[1:])
    assert config.trainer.v1.trainer_mode == "separate_async"
    chosen = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    import_external_libs(chosen.custom_backend_module)
    engine = CheckpointEngineRegistry.get(chosen.backend)
    settings = OmegaConf.to_container(OmegaConf.create(chosen.engine_kwargs))[chosen.backend]
    print(json.dumps([chosen.custom_backend_module, engine.__name__, settings]))


if __name__ == "__main__":
    main()
