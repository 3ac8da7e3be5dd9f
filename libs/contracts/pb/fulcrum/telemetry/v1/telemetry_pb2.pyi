from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_OK: _ClassVar[Outcome]
    OUTCOME_CLIENT_GONE: _ClassVar[Outcome]
    OUTCOME_REJECTED: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_OK: Outcome
OUTCOME_CLIENT_GONE: Outcome
OUTCOME_REJECTED: Outcome
OUTCOME_FAILED: Outcome

class StepBatch(_message.Message):
    __slots__ = ("worker_id", "incarnation", "sequence", "node", "gpus", "assignment", "covered_from_unix_ns", "covered_to_unix_ns", "steps", "kv_waits", "starved", "kv_transfers", "load", "dropped_batches", "engine", "step_time", "compute", "gpu_readings", "kv_blocks", "max_sequences", "last", "block_size_tokens", "chunk_tokens", "group", "dummy_steps", "sched_delay_ns", "estimate", "description")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    COVERED_FROM_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    COVERED_TO_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    KV_WAITS_FIELD_NUMBER: _ClassVar[int]
    STARVED_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    GPU_READINGS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DUMMY_STEPS_FIELD_NUMBER: _ClassVar[int]
    SCHED_DELAY_NS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    sequence: int
    node: str
    gpus: int
    assignment: _common_pb2.Assignment
    covered_from_unix_ns: int
    covered_to_unix_ns: int
    steps: StepColumns
    kv_waits: _containers.RepeatedCompositeFieldContainer[Interval]
    starved: _containers.RepeatedCompositeFieldContainer[Interval]
    kv_transfers: _containers.RepeatedCompositeFieldContainer[KvTransfer]
    load: _common_pb2.Load
    dropped_batches: int
    engine: str
    step_time: _common_pb2.StepTime
    compute: _common_pb2.Compute
    gpu_readings: _containers.RepeatedCompositeFieldContainer[GpuReading]
    kv_blocks: int
    max_sequences: int
    last: bool
    block_size_tokens: int
    chunk_tokens: int
    group: str
    dummy_steps: DummySteps
    sched_delay_ns: int
    estimate: PhaseEstimate
    description: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., node: _Optional[str] = ..., gpus: _Optional[int] = ..., assignment: _Optional[_Union[_common_pb2.Assignment, _Mapping]] = ..., covered_from_unix_ns: _Optional[int] = ..., covered_to_unix_ns: _Optional[int] = ..., steps: _Optional[_Union[StepColumns, _Mapping]] = ..., kv_waits: _Optional[_Iterable[_Union[Interval, _Mapping]]] = ..., starved: _Optional[_Iterable[_Union[Interval, _Mapping]]] = ..., kv_transfers: _Optional[_Iterable[_Union[KvTransfer, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., dropped_batches: _Optional[int] = ..., engine: _Optional[str] = ..., step_time: _Optional[_Union[_common_pb2.StepTime, _Mapping]] = ..., compute: _Optional[_Union[_common_pb2.Compute, _Mapping]] = ..., gpu_readings: _Optional[_Iterable[_Union[GpuReading, _Mapping]]] = ..., kv_blocks: _Optional[int] = ..., max_sequences: _Optional[int] = ..., last: _Optional[bool] = ..., block_size_tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., group: _Optional[str] = ..., dummy_steps: _Optional[_Union[DummySteps, _Mapping]] = ..., sched_delay_ns: _Optional[int] = ..., estimate: _Optional[_Union[PhaseEstimate, _Mapping]] = ..., description: _Optional[int] = ...) -> None: ...

class PhaseEstimate(_message.Message):
    __slots__ = ("busy_ns", "prefill_ns", "prefill_low_ns", "prefill_high_ns")
    BUSY_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOW_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HIGH_NS_FIELD_NUMBER: _ClassVar[int]
    busy_ns: int
    prefill_ns: int
    prefill_low_ns: int
    prefill_high_ns: int
    def __init__(self, busy_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., prefill_low_ns: _Optional[int] = ..., prefill_high_ns: _Optional[int] = ...) -> None: ...

class DummySteps(_message.Message):
    __slots__ = ("steps", "spans")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    spans: _containers.RepeatedCompositeFieldContainer[Interval]
    def __init__(self, steps: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[Interval, _Mapping]]] = ...) -> None: ...

class GpuReading(_message.Message):
    __slots__ = ("uuid", "index", "name", "utilisation", "memory_used_bytes", "memory_bytes", "power_w", "tensor_active", "dram_active")
    UUID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    TENSOR_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    DRAM_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    index: int
    name: str
    utilisation: float
    memory_used_bytes: int
    memory_bytes: int
    power_w: float
    tensor_active: float
    dram_active: float
    def __init__(self, uuid: _Optional[str] = ..., index: _Optional[int] = ..., name: _Optional[str] = ..., utilisation: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., power_w: _Optional[float] = ..., tensor_active: _Optional[float] = ..., dram_active: _Optional[float] = ...) -> None: ...

class StepColumns(_message.Message):
    __slots__ = ("start_unix_ns", "end_unix_ns", "prefill_tokens", "prefill_sequences", "prefill_context_tokens", "decode_sequences", "decode_kv_tokens", "prefill_squared_tokens", "epoch", "waiting", "waiting_prefill_tokens", "encoded_images")
    START_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DECODE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SQUARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    start_unix_ns: bytes
    end_unix_ns: bytes
    prefill_tokens: bytes
    prefill_sequences: bytes
    prefill_context_tokens: bytes
    decode_sequences: bytes
    decode_kv_tokens: bytes
    prefill_squared_tokens: bytes
    epoch: bytes
    waiting: bytes
    waiting_prefill_tokens: bytes
    encoded_images: bytes
    def __init__(self, start_unix_ns: _Optional[bytes] = ..., end_unix_ns: _Optional[bytes] = ..., prefill_tokens: _Optional[bytes] = ..., prefill_sequences: _Optional[bytes] = ..., prefill_context_tokens: _Optional[bytes] = ..., decode_sequences: _Optional[bytes] = ..., decode_kv_tokens: _Optional[bytes] = ..., prefill_squared_tokens: _Optional[bytes] = ..., epoch: _Optional[bytes] = ..., waiting: _Optional[bytes] = ..., waiting_prefill_tokens: _Optional[bytes] = ..., encoded_images: _Optional[bytes] = ...) -> None: ...

class Interval(_message.Message):
    __slots__ = ("start_unix_ns", "end_unix_ns")
    START_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    start_unix_ns: int
    end_unix_ns: int
    def __init__(self, start_unix_ns: _Optional[int] = ..., end_unix_ns: _Optional[int] = ...) -> None: ...

class KvTransfer(_message.Message):
    __slots__ = ("request_id", "from_worker_id", "blocks", "bytes", "start_unix_ns", "end_unix_ns", "prompt_tokens", "prompt_tokens_computed", "shared_memory", "ready_ns", "named")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    START_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    READY_NS_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    from_worker_id: str
    blocks: int
    bytes: int
    start_unix_ns: int
    end_unix_ns: int
    prompt_tokens: int
    prompt_tokens_computed: int
    shared_memory: bool
    ready_ns: int
    named: bool
    def __init__(self, request_id: _Optional[str] = ..., from_worker_id: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., start_unix_ns: _Optional[int] = ..., end_unix_ns: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., prompt_tokens_computed: _Optional[int] = ..., shared_memory: _Optional[bool] = ..., ready_ns: _Optional[int] = ..., named: _Optional[bool] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("request_id", "gateway_id", "tenant", "service_class", "model", "arrival_unix_ns", "prompt_tokens", "output_tokens", "cached_tokens", "queue_ns", "ttft_ns", "decode_ns", "prefill_worker", "decode_worker", "outcome", "finish_reason", "error_code", "traceparent", "ttft_deadline_unix_ns", "tpot_target_us", "reroutes", "moves", "predicted_ttft_ns", "recomputes", "max_output_tokens", "second_token_ns")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    TTFT_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TTFT_DEADLINE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_US_FIELD_NUMBER: _ClassVar[int]
    REROUTES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_NS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTES_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECOND_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    gateway_id: str
    tenant: str
    service_class: str
    model: str
    arrival_unix_ns: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    queue_ns: int
    ttft_ns: int
    decode_ns: int
    prefill_worker: str
    decode_worker: str
    outcome: Outcome
    finish_reason: str
    error_code: str
    traceparent: str
    ttft_deadline_unix_ns: int
    tpot_target_us: int
    reroutes: int
    moves: int
    predicted_ttft_ns: int
    recomputes: int
    max_output_tokens: int
    second_token_ns: int
    def __init__(self, request_id: _Optional[str] = ..., gateway_id: _Optional[str] = ..., tenant: _Optional[str] = ..., service_class: _Optional[str] = ..., model: _Optional[str] = ..., arrival_unix_ns: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_ns: _Optional[int] = ..., ttft_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., finish_reason: _Optional[str] = ..., error_code: _Optional[str] = ..., traceparent: _Optional[str] = ..., ttft_deadline_unix_ns: _Optional[int] = ..., tpot_target_us: _Optional[int] = ..., reroutes: _Optional[int] = ..., moves: _Optional[int] = ..., predicted_ttft_ns: _Optional[int] = ..., recomputes: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., second_token_ns: _Optional[int] = ...) -> None: ...

class GatewayQueues(_message.Message):
    __slots__ = ("gateway_id", "incarnation", "told_unix_ns", "queues", "last", "posts", "refused")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOLD_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    POSTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    incarnation: int
    told_unix_ns: int
    queues: _containers.RepeatedCompositeFieldContainer[ModelQueue]
    last: bool
    posts: int
    refused: _containers.RepeatedCompositeFieldContainer[RefusedRequests]
    def __init__(self, gateway_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., told_unix_ns: _Optional[int] = ..., queues: _Optional[_Iterable[_Union[ModelQueue, _Mapping]]] = ..., last: _Optional[bool] = ..., posts: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[RefusedRequests, _Mapping]]] = ...) -> None: ...

class RefusedRequests(_message.Message):
    __slots__ = ("status", "code", "count")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    status: int
    code: str
    count: int
    def __init__(self, status: _Optional[int] = ..., code: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ModelQueue(_message.Message):
    __slots__ = ("model", "prefill_requests", "prefill_tokens", "decode_requests", "decode_prompt_tokens", "hopeful_tokens", "arrived_tokens", "batch_requests", "batch_tokens", "batch_bound", "awaited", "overdue", "images", "arrived_images")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DECODE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOPEFUL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_BOUND_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    model: str
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_prompt_tokens: int
    hopeful_tokens: int
    arrived_tokens: int
    batch_requests: int
    batch_tokens: int
    batch_bound: int
    awaited: _containers.RepeatedCompositeFieldContainer[WaitingAge]
    overdue: int
    images: int
    arrived_images: int
    def __init__(self, model: _Optional[str] = ..., prefill_requests: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., decode_requests: _Optional[int] = ..., decode_prompt_tokens: _Optional[int] = ..., hopeful_tokens: _Optional[int] = ..., arrived_tokens: _Optional[int] = ..., batch_requests: _Optional[int] = ..., batch_tokens: _Optional[int] = ..., batch_bound: _Optional[int] = ..., awaited: _Optional[_Iterable[_Union[WaitingAge, _Mapping]]] = ..., overdue: _Optional[int] = ..., images: _Optional[int] = ..., arrived_images: _Optional[int] = ...) -> None: ...

class WaitingAge(_message.Message):
    __slots__ = ("requests", "mean_ms")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MEAN_MS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    mean_ms: int
    def __init__(self, requests: _Optional[int] = ..., mean_ms: _Optional[int] = ...) -> None: ...

class SharedWindows(_message.Message):
    __slots__ = ("metrics_id", "workers", "windows", "told_unix_ns", "incarnation", "loads", "reads_loads")
    METRICS_ID_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    TOLD_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    READS_LOADS_FIELD_NUMBER: _ClassVar[int]
    metrics_id: str
    workers: _containers.RepeatedCompositeFieldContainer[SharedWorker]
    windows: _containers.RepeatedCompositeFieldContainer[SharedWindow]
    told_unix_ns: int
    incarnation: int
    loads: SharedLoads
    reads_loads: bool
    def __init__(self, metrics_id: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[SharedWorker, _Mapping]]] = ..., windows: _Optional[_Iterable[_Union[SharedWindow, _Mapping]]] = ..., told_unix_ns: _Optional[int] = ..., incarnation: _Optional[int] = ..., loads: _Optional[_Union[SharedLoads, _Mapping]] = ..., reads_loads: _Optional[bool] = ...) -> None: ...

class SharedLoads(_message.Message):
    __slots__ = ("worker_ids", "part", "descriptions", "arrived_unix_ns", "last_step_end_unix_ns", "lost_batches", "running_step_unix_ns", "running_step_share", "covered_to_unix_ns", "dropped_batches", "dummy_steps", "cpu_waits", "running", "waiting", "waiting_prefill_tokens", "awaiting_kv", "free_kv_blocks", "preemptions", "recomputed_tokens", "pool_faults", "waiting_prefill_squares", "kv_pulls", "refused_kv_pulls", "awaiting_ready_kv", "ready_kv_since_unix_ns", "images_used", "images_encoded", "image_cache_bytes", "image_encode_ns", "windows", "waiting_encode_ns")
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    LOST_BATCHES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_STEP_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_STEP_SHARE_FIELD_NUMBER: _ClassVar[int]
    COVERED_TO_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    DUMMY_STEPS_FIELD_NUMBER: _ClassVar[int]
    CPU_WAITS_FIELD_NUMBER: _ClassVar[int]
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
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    part: int
    descriptions: bytes
    arrived_unix_ns: bytes
    last_step_end_unix_ns: bytes
    lost_batches: bytes
    running_step_unix_ns: bytes
    running_step_share: bytes
    covered_to_unix_ns: bytes
    dropped_batches: bytes
    dummy_steps: bytes
    cpu_waits: bytes
    running: bytes
    waiting: bytes
    waiting_prefill_tokens: bytes
    awaiting_kv: bytes
    free_kv_blocks: bytes
    preemptions: bytes
    recomputed_tokens: bytes
    pool_faults: bytes
    waiting_prefill_squares: bytes
    kv_pulls: bytes
    refused_kv_pulls: bytes
    awaiting_ready_kv: bytes
    ready_kv_since_unix_ns: bytes
    images_used: bytes
    images_encoded: bytes
    image_cache_bytes: bytes
    image_encode_ns: bytes
    windows: _containers.RepeatedCompositeFieldContainer[SharedCells]
    waiting_encode_ns: bytes
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ..., part: _Optional[int] = ..., descriptions: _Optional[bytes] = ..., arrived_unix_ns: _Optional[bytes] = ..., last_step_end_unix_ns: _Optional[bytes] = ..., lost_batches: _Optional[bytes] = ..., running_step_unix_ns: _Optional[bytes] = ..., running_step_share: _Optional[bytes] = ..., covered_to_unix_ns: _Optional[bytes] = ..., dropped_batches: _Optional[bytes] = ..., dummy_steps: _Optional[bytes] = ..., cpu_waits: _Optional[bytes] = ..., running: _Optional[bytes] = ..., waiting: _Optional[bytes] = ..., waiting_prefill_tokens: _Optional[bytes] = ..., awaiting_kv: _Optional[bytes] = ..., free_kv_blocks: _Optional[bytes] = ..., preemptions: _Optional[bytes] = ..., recomputed_tokens: _Optional[bytes] = ..., pool_faults: _Optional[bytes] = ..., waiting_prefill_squares: _Optional[bytes] = ..., kv_pulls: _Optional[bytes] = ..., refused_kv_pulls: _Optional[bytes] = ..., awaiting_ready_kv: _Optional[bytes] = ..., ready_kv_since_unix_ns: _Optional[bytes] = ..., images_used: _Optional[bytes] = ..., images_encoded: _Optional[bytes] = ..., image_cache_bytes: _Optional[bytes] = ..., image_encode_ns: _Optional[bytes] = ..., windows: _Optional[_Iterable[_Union[SharedCells, _Mapping]]] = ..., waiting_encode_ns: _Optional[bytes] = ...) -> None: ...

class SharedCells(_message.Message):
    __slots__ = ("start_unix_ns", "workers", "covered_ns", "prefill_ns", "decode_ns", "kv_wait_ns", "roles", "encode_ns")
    START_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COVERED_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    KV_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    start_unix_ns: int
    workers: bytes
    covered_ns: bytes
    prefill_ns: bytes
    decode_ns: bytes
    kv_wait_ns: bytes
    roles: bytes
    encode_ns: bytes
    def __init__(self, start_unix_ns: _Optional[int] = ..., workers: _Optional[bytes] = ..., covered_ns: _Optional[bytes] = ..., prefill_ns: _Optional[bytes] = ..., decode_ns: _Optional[bytes] = ..., kv_wait_ns: _Optional[bytes] = ..., roles: _Optional[bytes] = ..., encode_ns: _Optional[bytes] = ...) -> None: ...

class SharedWorker(_message.Message):
    __slots__ = ("newest", "arrived_unix_ns", "last_step_end_unix_ns", "lost_batches", "running_step_unix_ns", "running_step_share", "description")
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    LOST_BATCHES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_STEP_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_STEP_SHARE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    newest: StepBatch
    arrived_unix_ns: int
    last_step_end_unix_ns: int
    lost_batches: int
    running_step_unix_ns: int
    running_step_share: int
    description: int
    def __init__(self, newest: _Optional[_Union[StepBatch, _Mapping]] = ..., arrived_unix_ns: _Optional[int] = ..., last_step_end_unix_ns: _Optional[int] = ..., lost_batches: _Optional[int] = ..., running_step_unix_ns: _Optional[int] = ..., running_step_share: _Optional[int] = ..., description: _Optional[int] = ...) -> None: ...

class SharedWindow(_message.Message):
    __slots__ = ("start_unix_ns", "workers", "covered_ns", "prefill_ns", "decode_ns", "kv_wait_ns", "roles")
    START_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COVERED_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    KV_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    start_unix_ns: int
    workers: _containers.RepeatedScalarFieldContainer[int]
    covered_ns: _containers.RepeatedScalarFieldContainer[int]
    prefill_ns: _containers.RepeatedScalarFieldContainer[int]
    decode_ns: _containers.RepeatedScalarFieldContainer[int]
    kv_wait_ns: _containers.RepeatedScalarFieldContainer[int]
    roles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start_unix_ns: _Optional[int] = ..., workers: _Optional[_Iterable[int]] = ..., covered_ns: _Optional[_Iterable[int]] = ..., prefill_ns: _Optional[_Iterable[int]] = ..., decode_ns: _Optional[_Iterable[int]] = ..., kv_wait_ns: _Optional[_Iterable[int]] = ..., roles: _Optional[_Iterable[int]] = ...) -> None: ...

class FleetLoads(_message.Message):
    __slots__ = ("metrics_id", "incarnation", "told_unix_ns", "worker_ids", "incarnations", "covered_to_unix_ns", "epochs", "roles", "budget_tokens", "running", "waiting", "waiting_prefill_tokens", "awaiting_kv", "free_kv_blocks", "preemptions", "recomputed_tokens", "pool_faults", "windows", "step_times", "targets", "assessments", "cpu_waits", "images_used", "image_encode_ns", "waiting_encode_ns")
    METRICS_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOLD_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    COVERED_TO_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AWAITING_KV_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_FAULTS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    ASSESSMENTS_FIELD_NUMBER: _ClassVar[int]
    CPU_WAITS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_USED_FIELD_NUMBER: _ClassVar[int]
    IMAGE_ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    metrics_id: str
    incarnation: int
    told_unix_ns: int
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    incarnations: bytes
    covered_to_unix_ns: bytes
    epochs: bytes
    roles: bytes
    budget_tokens: bytes
    running: bytes
    waiting: bytes
    waiting_prefill_tokens: bytes
    awaiting_kv: bytes
    free_kv_blocks: bytes
    preemptions: bytes
    recomputed_tokens: bytes
    pool_faults: bytes
    windows: _containers.RepeatedCompositeFieldContainer[LoadWindow]
    step_times: _containers.RepeatedCompositeFieldContainer[WorkerStepTime]
    targets: _containers.RepeatedCompositeFieldContainer[_common_pb2.ModelTarget]
    assessments: _containers.RepeatedCompositeFieldContainer[ModelAssessment]
    cpu_waits: bytes
    images_used: bytes
    image_encode_ns: bytes
    waiting_encode_ns: bytes
    def __init__(self, metrics_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., told_unix_ns: _Optional[int] = ..., worker_ids: _Optional[_Iterable[str]] = ..., incarnations: _Optional[bytes] = ..., covered_to_unix_ns: _Optional[bytes] = ..., epochs: _Optional[bytes] = ..., roles: _Optional[bytes] = ..., budget_tokens: _Optional[bytes] = ..., running: _Optional[bytes] = ..., waiting: _Optional[bytes] = ..., waiting_prefill_tokens: _Optional[bytes] = ..., awaiting_kv: _Optional[bytes] = ..., free_kv_blocks: _Optional[bytes] = ..., preemptions: _Optional[bytes] = ..., recomputed_tokens: _Optional[bytes] = ..., pool_faults: _Optional[bytes] = ..., windows: _Optional[_Iterable[_Union[LoadWindow, _Mapping]]] = ..., step_times: _Optional[_Iterable[_Union[WorkerStepTime, _Mapping]]] = ..., targets: _Optional[_Iterable[_Union[_common_pb2.ModelTarget, _Mapping]]] = ..., assessments: _Optional[_Iterable[_Union[ModelAssessment, _Mapping]]] = ..., cpu_waits: _Optional[bytes] = ..., images_used: _Optional[bytes] = ..., image_encode_ns: _Optional[bytes] = ..., waiting_encode_ns: _Optional[bytes] = ...) -> None: ...

class ModelAssessment(_message.Message):
    __slots__ = ("model", "prefill", "decode", "prefill_pressure", "decode_pressure", "work", "step_time", "chunk_tokens", "max_sequences", "kv_tokens", "missing_workers", "advised")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    DECODE_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSING_WORKERS_FIELD_NUMBER: _ClassVar[int]
    ADVISED_FIELD_NUMBER: _ClassVar[int]
    model: str
    prefill: int
    decode: int
    prefill_pressure: float
    decode_pressure: float
    work: AssessedWork
    step_time: _common_pb2.StepTime
    chunk_tokens: int
    max_sequences: int
    kv_tokens: int
    missing_workers: int
    advised: AdvisedRoles
    def __init__(self, model: _Optional[str] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ..., prefill_pressure: _Optional[float] = ..., decode_pressure: _Optional[float] = ..., work: _Optional[_Union[AssessedWork, _Mapping]] = ..., step_time: _Optional[_Union[_common_pb2.StepTime, _Mapping]] = ..., chunk_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., missing_workers: _Optional[int] = ..., advised: _Optional[_Union[AdvisedRoles, _Mapping]] = ...) -> None: ...

class AssessedWork(_message.Message):
    __slots__ = ("prompts", "decodes", "kv_tokens", "tpot_ns", "waiting_ns", "held", "held_kv_tokens", "held_prompts")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TPOT_NS_FIELD_NUMBER: _ClassVar[int]
    WAITING_NS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HELD_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: float
    decodes: int
    kv_tokens: int
    tpot_ns: int
    waiting_ns: float
    held: int
    held_kv_tokens: int
    held_prompts: float
    def __init__(self, prompts: _Optional[float] = ..., decodes: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., tpot_ns: _Optional[int] = ..., waiting_ns: _Optional[float] = ..., held: _Optional[int] = ..., held_kv_tokens: _Optional[int] = ..., held_prompts: _Optional[float] = ...) -> None: ...

class AdvisedRoles(_message.Message):
    __slots__ = ("advice_id", "since_unix_ns", "worker_ids", "role", "budget_tokens", "reason", "pressure_then", "cause")
    ADVICE_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_THEN_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    advice_id: str
    since_unix_ns: int
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    role: _common_pb2.Role
    budget_tokens: int
    reason: str
    pressure_then: float
    cause: str
    def __init__(self, advice_id: _Optional[str] = ..., since_unix_ns: _Optional[int] = ..., worker_ids: _Optional[_Iterable[str]] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., budget_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., pressure_then: _Optional[float] = ..., cause: _Optional[str] = ...) -> None: ...

class LoadWindow(_message.Message):
    __slots__ = ("start_unix_ns", "workers", "covered_ns", "prefill_ns", "decode_ns")
    START_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COVERED_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    start_unix_ns: int
    workers: bytes
    covered_ns: bytes
    prefill_ns: bytes
    decode_ns: bytes
    def __init__(self, start_unix_ns: _Optional[int] = ..., workers: _Optional[bytes] = ..., covered_ns: _Optional[bytes] = ..., prefill_ns: _Optional[bytes] = ..., decode_ns: _Optional[bytes] = ...) -> None: ...

class WorkerStepTime(_message.Message):
    __slots__ = ("worker", "step_time")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    worker: int
    step_time: _common_pb2.StepTime
    def __init__(self, worker: _Optional[int] = ..., step_time: _Optional[_Union[_common_pb2.StepTime, _Mapping]] = ...) -> None: ...
