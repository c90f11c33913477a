"""refitd: new weights from a sharded trainer into sharded inference engines.

Names are loaded when they are used: `import refitd` alone imports neither torch nor zmq.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refitd.adapters.uneven_dtensor import (
        filter_unflattened_state_dict,
        gather_and_compute_chunk_metadata,
        gather_uneven_dtensor_to_full_tensor,
        get_unflattened_state_dict,
        preprocess_state_dict_for_uneven_dtensor,
        split_dtensor,
        update_uneven_dtensor_chunk_metadata,
        validate_uneven_dtensor,
    )
    from refitd.client import Client, connect
    from refitd.client.derived import Derived
    from refitd.client.mxfp8 import MXFP8Offer
    from refitd.copy_services.exchange import ExchangeService
    from refitd.describe.metadata import ParameterMetadata
    from refitd.describe.module import (
        extract_param_metadata,
        get_refit_tensor_dict,
        invalidate_refit_tensor_cache,
        named_persistent_buffers,
        named_refit_tensors,
    )
    from refitd.describe.names import assign_ep_resolved_name_inplace, assign_resolved_name_inplace
    from refitd.describe.roster import Roster
    from refitd.describe.tiles import Repeat, Tile
    from refitd.errors import (
        ArenaError,
        CommitError,
        ConfigError,
        DeadlineExceeded,
        IllegalTransition,
        PeerLost,
        PlanError,
        ProtocolError,
        RefitdError,
        RefitFailed,
        RefusedError,
        TransportError,
    )
    from refitd.plan.build import plan_reshard
    from refitd.plan.ops import ReshardPlan, ShardingDescriptor, TransferOp
    from refitd.plan.replicas import select_src_metadata_balanced
    from refitd.refit import (
        build_centralized_reshard_plan,
        clear_all_caches,
        clear_plan_cache,
        clear_service_cache,
        get_or_create_service,
        reshard_model_weights,
        swap_model_weights,
    )
    from refitd.transforms.base import ReshardTransform
    from refitd.transforms.cast import CastTransform
    from refitd.transforms.mxfp8 import MXFP8ReshardTransform
    from refitd.transforms.mxfp8_buffers import MXFP8Buffer
    from refitd.transforms.mxfp8_format import Rounding

__version__ = "0.1.0"

_HOMES = {
    "filter_unflattened_state_dict": "adapters.uneven_dtensor",
    "gather_and_compute_chunk_metadata": "adapters.uneven_dtensor",
    "gather_uneven_dtensor_to_full_tensor": "adapters.uneven_dtensor",
    "get_unflattened_state_dict": "adapters.uneven_dtensor",
    "preprocess_state_dict_for_uneven_dtensor": "adapters.uneven_dtensor",
    "split_dtensor": "adapters.uneven_dtensor",
    "update_uneven_dtensor_chunk_metadata": "adapters.uneven_dtensor",
    "validate_uneven_dtensor": "adapters.uneven_dtensor",
    "Client": "client",
    "connect": "client",
    "Derived": "client.derived",
    "MXFP8Offer": "client.mxfp8",
    "ExchangeService": "copy_services.exchange",
    "ParameterMetadata": "describe.metadata",
    "extract_param_metadata": "describe.module",
    "get_refit_tensor_dict": "describe.module",
    "invalidate_refit_tensor_cache": "describe.module",
    "named_persistent_buffers": "describe.module",
    "named_refit_tensors": "describe.module",
    "assign_ep_resolved_name_inplace": "describe.names",
    "assign_resolved_name_inplace": "describe.names",
    "Roster": "describe.roster",
    "Repeat": "describe.tiles",
    "Tile": "describe.tiles",
    "ArenaError": "errors",
    "CommitError": "errors",
    "ConfigError": "errors",
    "DeadlineExceeded": "errors",
    "IllegalTransition": "errors",
    "PeerLost": "errors",
    "PlanError": "errors",
    "ProtocolError": "errors",
    "RefitdError": "errors",
    "RefitFailed": "errors",
    "RefusedError": "errors",
    "TransportError": "errors",
    "plan_reshard": "plan.build",
    "ReshardPlan": "plan.ops",
    "ShardingDescriptor": "plan.ops",
    "TransferOp": "plan.ops",
    "select_src_metadata_balanced": "plan.replicas",
    "build_centralized_reshard_plan": "refit",
    "clear_all_caches": "refit",
    "clear_plan_cache": "refit",
    "clear_service_cache": "refit",
    "get_or_create_service": "refit",
    "reshard_model_weights": "refit",
    "swap_model_weights": "refit",
    "ReshardTransform": "transforms.base",
    "CastTransform": "transforms.cast",
    "MXFP8ReshardTransform": "transforms.mxfp8",
    "MXFP8Buffer": "transforms.mxfp8_buffers",
    "Rounding": "transforms.mxfp8_format",
}

__all__ = [
    "ArenaError",
    "CastTransform",
    "Client",
    "CommitError",
    "ConfigError",
    "DeadlineExceeded",
    "Derived",
    "ExchangeService",
    "IllegalTransition",
    "MXFP8Buffer",
    "MXFP8Offer",
    "MXFP8ReshardTransform",
    "ParameterMetadata",
    "PeerLost",
    "PlanError",
    "ProtocolError",
    "RefitFailed",
    "RefitdError",
    "RefusedError",
    "Repeat",
    "ReshardPlan",
    "ReshardTransform",
    "Roster",
    "Rounding",
    "ShardingDescriptor",
    "Tile",
    "TransferOp",
    "TransportError",
    "assign_ep_resolved_name_inplace",
    "assign_resolved_name_inplace",
    "build_centralized_reshard_plan",
    "clear_all_caches",
    "clear_plan_cache",
    "clear_service_cache",
    "connect",
    "extract_param_metadata",
    "filter_unflattened_state_dict",
    "gather_and_compute_chunk_metadata",
    "gather_uneven_dtensor_to_full_tensor",
    "get_or_create_service",
    "get_refit_tensor_dict",
    "get_unflattened_state_dict",
    "invalidate_refit_tensor_cache",
    "named_persistent_buffers",
    "named_refit_tensors",
    "plan_reshard",
    "preprocess_state_dict_for_uneven_dtensor",
    "reshard_model_weights",
    "select_src_metadata_balanced",
    "split_dtensor",
    "swap_model_weights",
    "update_uneven_dtensor_chunk_metadata",
    "validate_uneven_dtensor",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'refitd' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"refitd.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
