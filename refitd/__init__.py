"""refitd: new weights from a sharded trainer into sharded inference engines.

Names are loaded when they are used: `import refitd` alone imports neither torch nor zmq.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refitd.client import Client, connect
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

__version__ = "0.1.0"

_HOMES = {
    "Client": "client",
    "connect": "client",
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
}

__all__ = [
    "ArenaError",
    "Client",
    "CommitError",
    "ConfigError",
    "DeadlineExceeded",
    "IllegalTransition",
    "ParameterMetadata",
    "PeerLost",
    "PlanError",
    "ProtocolError",
    "RefitFailed",
    "RefitdError",
    "RefusedError",
    "Repeat",
    "ReshardPlan",
    "Roster",
    "ShardingDescriptor",
    "Tile",
    "TransferOp",
    "TransportError",
    "assign_ep_resolved_name_inplace",
    "assign_resolved_name_inplace",
    "connect",
    "extract_param_metadata",
    "get_refit_tensor_dict",
    "invalidate_refit_tensor_cache",
    "named_persistent_buffers",
    "named_refit_tensors",
    "plan_reshard",
    "select_src_metadata_balanced",
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
