"""What `refitd` exports, each name once: type checkers read this file, and `refitd/__init__.py` loads names by it."""

from . import (
    names as names,
    testing as testing,
)
from .inprocess.uneven_dtensor import (
    filter_unflattened_state_dict as filter_unflattened_state_dict,
    gather_and_compute_chunk_metadata as gather_and_compute_chunk_metadata,
    gather_uneven_dtensor_to_full_tensor as gather_uneven_dtensor_to_full_tensor,
    get_unflattened_state_dict as get_unflattened_state_dict,
    preprocess_state_dict_for_uneven_dtensor as preprocess_state_dict_for_uneven_dtensor,
    split_dtensor as split_dtensor,
    update_uneven_dtensor_chunk_metadata as update_uneven_dtensor_chunk_metadata,
    validate_uneven_dtensor as validate_uneven_dtensor,
)
from .checkpoints.publish import publish_checkpoint as publish_checkpoint
from .checkpoints.save import save_checkpoint as save_checkpoint
from .client import (
    Client as Client,
    connect as connect,
)
from .client.adopt import Adopted as Adopted
from .client.controller import ReplicaController as ReplicaController
from .client.target_tensors import Derived as Derived
from .client.memory_block import Placed as Placed
from .client.processes import Lifeline as Lifeline
from .client.source_tensors import MXFP8Offer as MXFP8Offer
from .client.source import Source as Source
from .client.streamed import StreamedSource as StreamedSource
from .client.target import Target as Target
from .copy_services import (
    ExchangeResult as ExchangeResult,
    ExchangeService as ExchangeService,
)
from .tracing.loader import (
    LoaderTrace as LoaderTrace,
    check_layout as check_layout,
    trace_loader as trace_loader,
)
from .describe.metadata import ParameterMetadata as ParameterMetadata
from .describe.module import (
    describe_module as describe_module,
    extract_param_metadata as extract_param_metadata,
    get_refit_tensor_dict as get_refit_tensor_dict,
    invalidate_refit_tensor_cache as invalidate_refit_tensor_cache,
    named_persistent_buffers as named_persistent_buffers,
    named_refit_tensors as named_refit_tensors,
)
from .describe.names import (
    assign_ep_resolved_name_inplace as assign_ep_resolved_name_inplace,
    assign_resolved_name_inplace as assign_resolved_name_inplace,
)
from .describe.metadata import Roster as Roster
from .describe.dtensors import flat_tiles as flat_tiles
from .describe.metadata import (
    Repeat as Repeat,
    Tile as Tile,
)
from .describe.names import unwrapped_name as unwrapped_name
from .errors import (
    ArenaError as ArenaError,
    CheckpointError as CheckpointError,
    CommitError as CommitError,
    ConfigError as ConfigError,
    DeadlineExceeded as DeadlineExceeded,
    IllegalTransition as IllegalTransition,
    Orphaned as Orphaned,
    PeerLost as PeerLost,
    PlanError as PlanError,
    ProtocolError as ProtocolError,
    RefitdError as RefitdError,
    RefitFailed as RefitFailed,
    RefusedError as RefusedError,
    TransportError as TransportError,
)
from .mxfp8.format import Rounding as Rounding
from .plan.build import plan_reshard as plan_reshard
from .plan.ops import (
    ReshardPlan as ReshardPlan,
    ShardingDescriptor as ShardingDescriptor,
    TransferOp as TransferOp,
)
from .inprocess.one_parameter import select_src_metadata_balanced as select_src_metadata_balanced
from .protocol.reports import (
    SwapFailed as SwapFailed,
    SwapReport as SwapReport,
)
from .inprocess.refit import (
    RefitBackendName as RefitBackendName,
    build_centralized_reshard_plan as build_centralized_reshard_plan,
    clear_all_caches as clear_all_caches,
    clear_plan_cache as clear_plan_cache,
    clear_service_cache as clear_service_cache,
    execute_reshard_plan as execute_reshard_plan,
    get_or_create_service as get_or_create_service,
    reshard_model_weights as reshard_model_weights,
    swap_model_weights as swap_model_weights,
)
from .inprocess.agree import AgreedPlan as AgreedPlan
from .states import (
    MemberState as MemberState,
    ProofState as ProofState,
    ServingState as ServingState,
    SwapCause as SwapCause,
    SwapOutcome as SwapOutcome,
    TransferMode as TransferMode,
)
from .transforms import ReshardTransform as ReshardTransform
from .transforms import CastTransform as CastTransform
from .mxfp8.transform import MXFP8ReshardTransform as MXFP8ReshardTransform
from .mxfp8.buffers import FP8Buffer as FP8Buffer
from .mxfp8.buffers import MXFP8Buffer as MXFP8Buffer

__version__: str
