from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]
    ROLE_STANDBY: _ClassVar[Role]

class FirstToken(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FIRST_TOKEN_UNSPECIFIED: _ClassVar[FirstToken]
    FIRST_TOKEN_FROM_PREFILL: _ClassVar[FirstToken]
    FIRST_TOKEN_FROM_DECODE: _ClassVar[FirstToken]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_LOADING: _ClassVar[WorkerState]
    WORKER_STATE_ASLEEP: _ClassVar[WorkerState]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_MIXED: Role
ROLE_STANDBY: Role
FIRST_TOKEN_UNSPECIFIED: FirstToken
FIRST_TOKEN_FROM_PREFILL: FirstToken
FIRST_TOKEN_FROM_DECODE: FirstToken
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_LOADING: WorkerState
WORKER_STATE_ASLEEP: WorkerState

class Assignment(_message.Message):
    __slots__ = ("model", "role", "budget_tokens", "epoch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: Role
    budget_tokens: int
    epoch: int
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., budget_tokens: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("block_size_tokens", "kv_blocks", "kv_block_bytes", "max_context_tokens", "max_sequences", "moves_running_kv", "streams_kv", "first_token", "kv_layout", "chunk_tokens", "compute", "kv_once", "images", "named_kv")
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MOVES_RUNNING_KV_FIELD_NUMBER: _ClassVar[int]
    STREAMS_KV_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    KV_ONCE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    NAMED_KV_FIELD_NUMBER: _ClassVar[int]
    block_size_tokens: int
    kv_blocks: int
    kv_block_bytes: int
    max_context_tokens: int
    max_sequences: int
    moves_running_kv: bool
    streams_kv: bool
    first_token: FirstToken
    kv_layout: str
    chunk_tokens: int
    compute: Compute
    kv_once: bool
    images: bool
    named_kv: bool
    def __init__(self, block_size_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., kv_block_bytes: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., moves_running_kv: _Optional[bool] = ..., streams_kv: _Optional[bool] = ..., first_token: _Optional[_Union[FirstToken, str]] = ..., kv_layout: _Optional[str] = ..., chunk_tokens: _Optional[int] = ..., compute: _Optional[_Union[Compute, _Mapping]] = ..., kv_once: _Optional[bool] = ..., images: _Optional[bool] = ..., named_kv: _Optional[bool] = ...) -> None: ...

class Compute(_message.Message):
    __slots__ = ("layer_parameters", "head_parameters", "parameter_bytes", "attention_width", "kv_token_bytes", "peak_flops_per_s", "peak_bytes_per_s", "kv_window_token_bytes", "kv_window_tokens", "kv_state_bytes")
    LAYER_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    HEAD_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_WIDTH_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_WINDOW_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    layer_parameters: int
    head_parameters: int
    parameter_bytes: int
    attention_width: int
    kv_token_bytes: int
    peak_flops_per_s: float
    peak_bytes_per_s: float
    kv_window_token_bytes: int
    kv_window_tokens: int
    kv_state_bytes: int
    def __init__(self, layer_parameters: _Optional[int] = ..., head_parameters: _Optional[int] = ..., parameter_bytes: _Optional[int] = ..., attention_width: _Optional[int] = ..., kv_token_bytes: _Optional[int] = ..., peak_flops_per_s: _Optional[float] = ..., peak_bytes_per_s: _Optional[float] = ..., kv_window_token_bytes: _Optional[int] = ..., kv_window_tokens: _Optional[int] = ..., kv_state_bytes: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("id", "incarnation", "node", "pid", "address", "assignment", "engine", "device", "gpus", "nodes", "capabilities", "state", "model_revision", "version", "role_change", "protocol", "oldest_protocol", "pool", "gpu_uuids", "gpu_share", "group")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_CHANGE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    GPU_UUIDS_FIELD_NUMBER: _ClassVar[int]
    GPU_SHARE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    id: str
    incarnation: int
    node: str
    pid: int
    address: str
    assignment: Assignment
    engine: str
    device: str
    gpus: int
    nodes: int
    capabilities: Capabilities
    state: WorkerState
    model_revision: str
    version: str
    role_change: RoleChange
    protocol: int
    oldest_protocol: int
    pool: PoolWorker
    gpu_uuids: _containers.RepeatedScalarFieldContainer[str]
    gpu_share: float
    group: str
    def __init__(self, id: _Optional[str] = ..., incarnation: _Optional[int] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., engine: _Optional[str] = ..., device: _Optional[str] = ..., gpus: _Optional[int] = ..., nodes: _Optional[int] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., model_revision: _Optional[str] = ..., version: _Optional[str] = ..., role_change: _Optional[_Union[RoleChange, _Mapping]] = ..., protocol: _Optional[int] = ..., oldest_protocol: _Optional[int] = ..., pool: _Optional[_Union[PoolWorker, _Mapping]] = ..., gpu_uuids: _Optional[_Iterable[str]] = ..., gpu_share: _Optional[float] = ..., group: _Optional[str] = ...) -> None: ...

class PoolWorker(_message.Message):
    __slots__ = ("address", "since_unix_ns", "asleep", "memory_bytes", "host_memory_bytes", "load_bytes_per_s", "wake_bytes_per_s", "overhead_s", "expected_ns", "last")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAKE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_NS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    address: str
    since_unix_ns: int
    asleep: _containers.RepeatedCompositeFieldContainer[HeldModel]
    memory_bytes: int
    host_memory_bytes: int
    load_bytes_per_s: float
    wake_bytes_per_s: float
    overhead_s: float
    expected_ns: int
    last: ModelMove
    def __init__(self, address: _Optional[str] = ..., since_unix_ns: _Optional[int] = ..., asleep: _Optional[_Iterable[_Union[HeldModel, _Mapping]]] = ..., memory_bytes: _Optional[int] = ..., host_memory_bytes: _Optional[int] = ..., load_bytes_per_s: _Optional[float] = ..., wake_bytes_per_s: _Optional[float] = ..., overhead_s: _Optional[float] = ..., expected_ns: _Optional[int] = ..., last: _Optional[_Union[ModelMove, _Mapping]] = ...) -> None: ...

class HeldModel(_message.Message):
    __slots__ = ("model", "size_bytes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    size_bytes: int
    def __init__(self, model: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ModelMove(_message.Message):
    __slots__ = ("model", "from_host", "took_ns", "error", "unix_ns")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FROM_HOST_FIELD_NUMBER: _ClassVar[int]
    TOOK_NS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    model: str
    from_host: bool
    took_ns: int
    error: str
    unix_ns: int
    def __init__(self, model: _Optional[str] = ..., from_host: _Optional[bool] = ..., took_ns: _Optional[int] = ..., error: _Optional[str] = ..., unix_ns: _Optional[int] = ...) -> None: ...

class RoleChange(_message.Message):
    __slots__ = ("actor", "reason", "unix_ns", "own_budget_tokens")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    OWN_BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    actor: str
    reason: str
    unix_ns: int
    own_budget_tokens: int
    def __init__(self, actor: _Optional[str] = ..., reason: _Optional[str] = ..., unix_ns: _Optional[int] = ..., own_budget_tokens: _Optional[int] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("prefill_floor_ns", "prefill_fixed_ns", "prefill_token_ns", "prefill_token_squared_ns", "decode_fixed_ns", "decode_sequence_ns", "decode_kv_token_ns", "interference", "prefill", "decode", "mixed", "decode_matrix_ns", "kv_token_ns", "saturating_sequences", "decode_wide_ns", "graph_sequences", "graph_exit_ns")
    PREFILL_FLOOR_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIXED_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_SQUARED_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIXED_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQUENCE_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_KV_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    INTERFERENCE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    MIXED_FIELD_NUMBER: _ClassVar[int]
    DECODE_MATRIX_NS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    SATURATING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DECODE_WIDE_NS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    GRAPH_EXIT_NS_FIELD_NUMBER: _ClassVar[int]
    prefill_floor_ns: float
    prefill_fixed_ns: float
    prefill_token_ns: float
    prefill_token_squared_ns: float
    decode_fixed_ns: float
    decode_sequence_ns: float
    decode_kv_token_ns: float
    interference: float
    prefill: StepKindFit
    decode: StepKindFit
    mixed: StepKindFit
    decode_matrix_ns: float
    kv_token_ns: float
    saturating_sequences: int
    decode_wide_ns: float
    graph_sequences: int
    graph_exit_ns: float
    def __init__(self, prefill_floor_ns: _Optional[float] = ..., prefill_fixed_ns: _Optional[float] = ..., prefill_token_ns: _Optional[float] = ..., prefill_token_squared_ns: _Optional[float] = ..., decode_fixed_ns: _Optional[float] = ..., decode_sequence_ns: _Optional[float] = ..., decode_kv_token_ns: _Optional[float] = ..., interference: _Optional[float] = ..., prefill: _Optional[_Union[StepKindFit, _Mapping]] = ..., decode: _Optional[_Union[StepKindFit, _Mapping]] = ..., mixed: _Optional[_Union[StepKindFit, _Mapping]] = ..., decode_matrix_ns: _Optional[float] = ..., kv_token_ns: _Optional[float] = ..., saturating_sequences: _Optional[int] = ..., decode_wide_ns: _Optional[float] = ..., graph_sequences: _Optional[int] = ..., graph_exit_ns: _Optional[float] = ...) -> None: ...

class StepKindFit(_message.Message):
    __slots__ = ("steps", "error_p50", "error_p90")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ERROR_P50_FIELD_NUMBER: _ClassVar[int]
    ERROR_P90_FIELD_NUMBER: _ClassVar[int]
    steps: int
    error_p50: float
    error_p90: float
    def __init__(self, steps: _Optional[int] = ..., error_p50: _Optional[float] = ..., error_p90: _Optional[float] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "waiting_prefill_tokens", "awaiting_kv", "free_kv_blocks", "preemptions", "recomputed_tokens", "pool_faults", "waiting_prefill_squares", "kv_pulls", "refused_kv_pulls", "awaiting_ready_kv", "ready_kv_since_unix_ns", "images_used", "images_encoded", "image_cache_bytes", "image_encode_ns", "waiting_encode_ns")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AWAITING_KV_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_FAULTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_SQUARES_FIELD_NUMBER: _ClassVar[int]
    KV_PULLS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_KV_PULLS_FIELD_NUMBER: _ClassVar[int]
    AWAITING_READY_KV_FIELD_NUMBER: _ClassVar[int]
    READY_KV_SINCE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_USED_FIELD_NUMBER: _ClassVar[int]
    IMAGES_ENCODED_FIELD_NUMBER: _ClassVar[int]
    IMAGE_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_prefill_tokens: int
    awaiting_kv: int
    free_kv_blocks: int
    preemptions: int
    recomputed_tokens: int
    pool_faults: int
    waiting_prefill_squares: int
    kv_pulls: int
    refused_kv_pulls: int
    awaiting_ready_kv: int
    ready_kv_since_unix_ns: int
    images_used: int
    images_encoded: int
    image_cache_bytes: int
    image_encode_ns: int
    waiting_encode_ns: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., awaiting_kv: _Optional[int] = ..., free_kv_blocks: _Optional[int] = ..., preemptions: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., pool_faults: _Optional[int] = ..., waiting_prefill_squares: _Optional[int] = ..., kv_pulls: _Optional[int] = ..., refused_kv_pulls: _Optional[int] = ..., awaiting_ready_kv: _Optional[int] = ..., ready_kv_since_unix_ns: _Optional[int] = ..., images_used: _Optional[int] = ..., images_encoded: _Optional[int] = ..., image_cache_bytes: _Optional[int] = ..., image_encode_ns: _Optional[int] = ..., waiting_encode_ns: _Optional[int] = ...) -> None: ...

class ModelTarget(_message.Message):
    __slots__ = ("model", "tpot_ns", "ttft_ns")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TPOT_NS_FIELD_NUMBER: _ClassVar[int]
    TTFT_NS_FIELD_NUMBER: _ClassVar[int]
    model: str
    tpot_ns: int
    ttft_ns: int
    def __init__(self, model: _Optional[str] = ..., tpot_ns: _Optional[int] = ..., ttft_ns: _Optional[int] = ...) -> None: ...
