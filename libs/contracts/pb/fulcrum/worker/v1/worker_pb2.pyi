from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]
    PHASE_BOTH: _ClassVar[Phase]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]
    POOLING_CLS: _ClassVar[Pooling]
    POOLING_SCORE: _ClassVar[Pooling]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]

class RefusalCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_CODE_UNSPECIFIED: _ClassVar[RefusalCode]
    REFUSAL_CODE_STALE_ROLE: _ClassVar[RefusalCode]
    REFUSAL_CODE_NO_CAPACITY: _ClassVar[RefusalCode]
    REFUSAL_CODE_DRAINING: _ClassVar[RefusalCode]
    REFUSAL_CODE_INVALID: _ClassVar[RefusalCode]
    REFUSAL_CODE_KV_MISMATCH: _ClassVar[RefusalCode]

class FailureCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CODE_UNSPECIFIED: _ClassVar[FailureCode]
    FAILURE_CODE_KV_LOST: _ClassVar[FailureCode]
    FAILURE_CODE_ENGINE: _ClassVar[FailureCode]

class PullFailure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PULL_FAILURE_UNSPECIFIED: _ClassVar[PullFailure]
    PULL_FAILURE_KV_LOST: _ClassVar[PullFailure]
    PULL_FAILURE_KV_MISMATCH: _ClassVar[PullFailure]
PHASE_UNSPECIFIED: Phase
PHASE_PREFILL: Phase
PHASE_DECODE: Phase
PHASE_BOTH: Phase
POOLING_UNSPECIFIED: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
POOLING_CLS: Pooling
POOLING_SCORE: Pooling
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
REFUSAL_CODE_UNSPECIFIED: RefusalCode
REFUSAL_CODE_STALE_ROLE: RefusalCode
REFUSAL_CODE_NO_CAPACITY: RefusalCode
REFUSAL_CODE_DRAINING: RefusalCode
REFUSAL_CODE_INVALID: RefusalCode
REFUSAL_CODE_KV_MISMATCH: RefusalCode
FAILURE_CODE_UNSPECIFIED: FailureCode
FAILURE_CODE_KV_LOST: FailureCode
FAILURE_CODE_ENGINE: FailureCode
PULL_FAILURE_UNSPECIFIED: PullFailure
PULL_FAILURE_KV_LOST: PullFailure
PULL_FAILURE_KV_MISMATCH: PullFailure

class GatewayFrame(_message.Message):
    __slots__ = ("hello", "submits", "aborts", "demand", "returned_prefill", "returned_decode", "proceeds", "hand_overs", "epoch", "spent_prefill", "spent_decode")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    RETURNED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    RETURNED_DECODE_FIELD_NUMBER: _ClassVar[int]
    PROCEEDS_FIELD_NUMBER: _ClassVar[int]
    HAND_OVERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPENT_PREFILL_FIELD_NUMBER: _ClassVar[int]
    SPENT_DECODE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    aborts: bytes
    demand: Demand
    returned_prefill: int
    returned_decode: int
    proceeds: _containers.RepeatedCompositeFieldContainer[Proceed]
    hand_overs: bytes
    epoch: int
    spent_prefill: int
    spent_decode: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., aborts: _Optional[bytes] = ..., demand: _Optional[_Union[Demand, _Mapping]] = ..., returned_prefill: _Optional[int] = ..., returned_decode: _Optional[int] = ..., proceeds: _Optional[_Iterable[_Union[Proceed, _Mapping]]] = ..., hand_overs: _Optional[bytes] = ..., epoch: _Optional[int] = ..., spent_prefill: _Optional[int] = ..., spent_decode: _Optional[int] = ...) -> None: ...

class Proceed(_message.Message):
    __slots__ = ("sequence", "token_ids")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    token_ids: bytes
    def __init__(self, sequence: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("gateway_id", "cluster", "protocol", "oldest_protocol")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    cluster: str
    protocol: int
    oldest_protocol: int
    def __init__(self, gateway_id: _Optional[str] = ..., cluster: _Optional[str] = ..., protocol: _Optional[int] = ..., oldest_protocol: _Optional[int] = ...) -> None: ...

class Demand(_message.Message):
    __slots__ = ("waiting", "waiting_tokens", "head_deadline_unix_ns")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DEADLINE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    waiting_tokens: int
    head_deadline_unix_ns: int
    def __init__(self, waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., head_deadline_unix_ns: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("sequence", "request_id", "epoch", "phase", "token_ids", "prompt_tokens", "max_output_tokens", "sampling", "context", "kv", "model", "adapter", "adapter_source", "pooling", "images", "second_from", "kv_name")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SOURCE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SECOND_FROM_FIELD_NUMBER: _ClassVar[int]
    KV_NAME_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    request_id: str
    epoch: int
    phase: Phase
    token_ids: bytes
    prompt_tokens: int
    max_output_tokens: int
    sampling: Sampling
    context: RequestContext
    kv: KvSource
    model: str
    adapter: str
    adapter_source: str
    pooling: Pooling
    images: _containers.RepeatedCompositeFieldContainer[Image]
    second_from: int
    kv_name: bytes
    def __init__(self, sequence: _Optional[int] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., token_ids: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., context: _Optional[_Union[RequestContext, _Mapping]] = ..., kv: _Optional[_Union[KvSource, _Mapping]] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_source: _Optional[str] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., second_from: _Optional[int] = ..., kv_name: _Optional[bytes] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("first", "tokens", "digest", "data")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    first: int
    tokens: int
    digest: bytes
    data: bytes
    def __init__(self, first: _Optional[int] = ..., tokens: _Optional[int] = ..., digest: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class RequestContext(_message.Message):
    __slots__ = ("tenant", "service_class", "arrival_unix_ns", "ttft_deadline_unix_ns", "tpot_target_us", "gateway_id", "traceparent", "cache_salt")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    TTFT_DEADLINE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_US_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    service_class: str
    arrival_unix_ns: int
    ttft_deadline_unix_ns: int
    tpot_target_us: int
    gateway_id: str
    traceparent: str
    cache_salt: str
    def __init__(self, tenant: _Optional[str] = ..., service_class: _Optional[str] = ..., arrival_unix_ns: _Optional[int] = ..., ttft_deadline_unix_ns: _Optional[int] = ..., tpot_target_us: _Optional[int] = ..., gateway_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "stop_token_ids", "ignore_eos", "guide", "min_tokens", "prompt_logprobs", "prompt_top_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    GUIDE_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: bool
    top_logprobs: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    guide: str
    min_tokens: int
    prompt_logprobs: bool
    prompt_top_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., guide: _Optional[str] = ..., min_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., prompt_top_logprobs: _Optional[int] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "handle", "tokens", "blocks", "streamed", "kv_layout", "named")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STREAMED_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    address: str
    handle: bytes
    tokens: int
    blocks: int
    streamed: bool
    kv_layout: str
    named: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., handle: _Optional[bytes] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., streamed: _Optional[bool] = ..., kv_layout: _Optional[str] = ..., named: _Optional[bool] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("worker", "credit", "load", "token_sequences", "token_ids", "logprobs", "events", "submits_taken", "speed")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.Worker
    credit: Credit
    load: _common_pb2.Load
    token_sequences: bytes
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    events: _containers.RepeatedCompositeFieldContainer[SequenceEvent]
    submits_taken: int
    speed: Speed
    def __init__(self, worker: _Optional[_Union[_common_pb2.Worker, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., token_sequences: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[SequenceEvent, _Mapping]]] = ..., submits_taken: _Optional[int] = ..., speed: _Optional[_Union[Speed, _Mapping]] = ...) -> None: ...

class Speed(_message.Message):
    __slots__ = ("step_time", "kv_token_ns", "measured", "chunk_tokens")
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step_time: _common_pb2.StepTime
    kv_token_ns: float
    measured: bool
    chunk_tokens: int
    def __init__(self, step_time: _Optional[_Union[_common_pb2.StepTime, _Mapping]] = ..., kv_token_ns: _Optional[float] = ..., measured: _Optional[bool] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("prefill_grant", "decode_grant", "prefill_recall", "decode_recall")
    PREFILL_GRANT_FIELD_NUMBER: _ClassVar[int]
    DECODE_GRANT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RECALL_FIELD_NUMBER: _ClassVar[int]
    DECODE_RECALL_FIELD_NUMBER: _ClassVar[int]
    prefill_grant: int
    decode_grant: int
    prefill_recall: int
    decode_recall: int
    def __init__(self, prefill_grant: _Optional[int] = ..., decode_grant: _Optional[int] = ..., prefill_recall: _Optional[int] = ..., decode_recall: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("index", "logprob", "top_ids", "top_logprobs", "prompt", "prompt_top_ids", "prompt_top")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_FIELD_NUMBER: _ClassVar[int]
    index: int
    logprob: float
    top_ids: bytes
    top_logprobs: bytes
    prompt: bytes
    prompt_top_ids: bytes
    prompt_top: bytes
    def __init__(self, index: _Optional[int] = ..., logprob: _Optional[float] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., prompt: _Optional[bytes] = ..., prompt_top_ids: _Optional[bytes] = ..., prompt_top: _Optional[bytes] = ...) -> None: ...

class SequenceEvent(_message.Message):
    __slots__ = ("sequence", "prefilled", "kv_pulling", "finished", "refused", "failed", "kv_opened", "leaving", "moved")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    KV_PULLING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    KV_OPENED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    prefilled: Prefilled
    kv_pulling: KvPulling
    finished: Finished
    refused: Refused
    failed: Failed
    kv_opened: KvOpened
    leaving: Leaving
    moved: Moved
    def __init__(self, sequence: _Optional[int] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., kv_pulling: _Optional[_Union[KvPulling, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., kv_opened: _Optional[_Union[KvOpened, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Moved(_message.Message):
    __slots__ = ("kv", "cached_tokens", "computed_prompt_tokens")
    KV_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kv: KvSource
    cached_tokens: int
    computed_prompt_tokens: int
    def __init__(self, kv: _Optional[_Union[KvSource, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., computed_prompt_tokens: _Optional[int] = ...) -> None: ...

class KvOpened(_message.Message):
    __slots__ = ("kv",)
    KV_FIELD_NUMBER: _ClassVar[int]
    kv: KvSource
    def __init__(self, kv: _Optional[_Union[KvSource, _Mapping]] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("kv", "cached_tokens", "computed_tokens")
    KV_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kv: KvSource
    cached_tokens: int
    computed_tokens: int
    def __init__(self, kv: _Optional[_Union[KvSource, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ...) -> None: ...

class KvPulling(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "output_tokens", "cached_tokens", "computed_prompt_tokens", "kv_bytes_received", "pooled")
    REASON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    output_tokens: int
    cached_tokens: int
    computed_prompt_tokens: int
    kv_bytes_received: int
    pooled: bytes
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., computed_prompt_tokens: _Optional[int] = ..., kv_bytes_received: _Optional[int] = ..., pooled: _Optional[bytes] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "epoch", "detail")
    CODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    code: RefusalCode
    epoch: int
    detail: str
    def __init__(self, code: _Optional[_Union[RefusalCode, str]] = ..., epoch: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("code", "detail")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    code: FailureCode
    detail: str
    def __init__(self, code: _Optional[_Union[FailureCode, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class PullFrame(_message.Message):
    __slots__ = ("receiver_id", "opens", "taken", "acks", "cancels")
    RECEIVER_ID_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    receiver_id: str
    opens: _containers.RepeatedCompositeFieldContainer[PullOpen]
    taken: _containers.RepeatedCompositeFieldContainer[PullTaken]
    acks: bytes
    cancels: bytes
    def __init__(self, receiver_id: _Optional[str] = ..., opens: _Optional[_Iterable[_Union[PullOpen, _Mapping]]] = ..., taken: _Optional[_Iterable[_Union[PullTaken, _Mapping]]] = ..., acks: _Optional[bytes] = ..., cancels: _Optional[bytes] = ...) -> None: ...

class PullOpen(_message.Message):
    __slots__ = ("pull", "handle", "incarnation", "kv_layout", "from_block", "shared_nonce", "named")
    PULL_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FROM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SHARED_NONCE_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    pull: int
    handle: bytes
    incarnation: int
    kv_layout: str
    from_block: int
    shared_nonce: bytes
    named: bool
    def __init__(self, pull: _Optional[int] = ..., handle: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., kv_layout: _Optional[str] = ..., from_block: _Optional[int] = ..., shared_nonce: _Optional[bytes] = ..., named: _Optional[bool] = ...) -> None: ...

class PullTaken(_message.Message):
    __slots__ = ("pull", "sent_bytes")
    PULL_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    pull: int
    sent_bytes: int
    def __init__(self, pull: _Optional[int] = ..., sent_bytes: _Optional[int] = ...) -> None: ...

class KvFrame(_message.Message):
    __slots__ = ("chunks", "failed", "alive", "ready", "data")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[KvChunk]
    failed: _containers.RepeatedCompositeFieldContainer[PullFailed]
    alive: bytes
    ready: _containers.RepeatedCompositeFieldContainer[PullReady]
    data: bytes
    def __init__(self, chunks: _Optional[_Iterable[_Union[KvChunk, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[PullFailed, _Mapping]]] = ..., alive: _Optional[bytes] = ..., ready: _Optional[_Iterable[_Union[PullReady, _Mapping]]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PullReady(_message.Message):
    __slots__ = ("pull", "blocks")
    PULL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pull: int
    blocks: int
    def __init__(self, pull: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class KvChunk(_message.Message):
    __slots__ = ("pull", "first_block", "blocks", "data_bytes", "sent_bytes", "last", "checksums", "pool_blocks", "ready_blocks", "token_ids", "waited_ns")
    PULL_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_NS_FIELD_NUMBER: _ClassVar[int]
    pull: int
    first_block: int
    blocks: int
    data_bytes: int
    sent_bytes: int
    last: bool
    checksums: _containers.RepeatedScalarFieldContainer[int]
    pool_blocks: _containers.RepeatedScalarFieldContainer[int]
    ready_blocks: int
    token_ids: bytes
    waited_ns: int
    def __init__(self, pull: _Optional[int] = ..., first_block: _Optional[int] = ..., blocks: _Optional[int] = ..., data_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., last: _Optional[bool] = ..., checksums: _Optional[_Iterable[int]] = ..., pool_blocks: _Optional[_Iterable[int]] = ..., ready_blocks: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., waited_ns: _Optional[int] = ...) -> None: ...

class PullFailed(_message.Message):
    __slots__ = ("pull", "failure", "detail")
    PULL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    pull: int
    failure: PullFailure
    detail: str
    def __init__(self, pull: _Optional[int] = ..., failure: _Optional[_Union[PullFailure, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker", "load", "integrity", "gateways_behind", "first_step_ns")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_NS_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.Worker
    load: _common_pb2.Load
    integrity: Integrity
    gateways_behind: int
    first_step_ns: int
    def __init__(self, worker: _Optional[_Union[_common_pb2.Worker, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., integrity: _Optional[_Union[Integrity, _Mapping]] = ..., gateways_behind: _Optional[int] = ..., first_step_ns: _Optional[int] = ...) -> None: ...

class Integrity(_message.Message):
    __slots__ = ("live_sequences", "referenced_blocks", "leased_handles", "attached_gateways", "pool_faults")
    LIVE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    REFERENCED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    POOL_FAULTS_FIELD_NUMBER: _ClassVar[int]
    live_sequences: int
    referenced_blocks: int
    leased_handles: int
    attached_gateways: int
    pool_faults: int
    def __init__(self, live_sequences: _Optional[int] = ..., referenced_blocks: _Optional[int] = ..., leased_handles: _Optional[int] = ..., attached_gateways: _Optional[int] = ..., pool_faults: _Optional[int] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("expected_epoch", "role", "budget_tokens", "model", "reason", "actor", "incarnation", "own_budget_tokens", "wait_ms", "force", "lead_term")
    EXPECTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OWN_BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    LEAD_TERM_FIELD_NUMBER: _ClassVar[int]
    expected_epoch: int
    role: _common_pb2.Role
    budget_tokens: int
    model: str
    reason: str
    actor: str
    incarnation: int
    own_budget_tokens: int
    wait_ms: int
    force: bool
    lead_term: int
    def __init__(self, expected_epoch: _Optional[int] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., budget_tokens: _Optional[int] = ..., model: _Optional[str] = ..., reason: _Optional[str] = ..., actor: _Optional[str] = ..., incarnation: _Optional[int] = ..., own_budget_tokens: _Optional[int] = ..., wait_ms: _Optional[int] = ..., force: _Optional[bool] = ..., lead_term: _Optional[int] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("assignment", "gateways_behind", "waited_ns", "running")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    WAITED_NS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    assignment: _common_pb2.Assignment
    gateways_behind: int
    waited_ns: int
    running: int
    def __init__(self, assignment: _Optional[_Union[_common_pb2.Assignment, _Mapping]] = ..., gateways_behind: _Optional[int] = ..., waited_ns: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...

class AssignModelRequest(_message.Message):
    __slots__ = ("expected_epoch", "incarnation", "model", "source", "size_bytes", "actor", "reason", "forget", "lead_term")
    EXPECTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    LEAD_TERM_FIELD_NUMBER: _ClassVar[int]
    expected_epoch: int
    incarnation: int
    model: str
    source: str
    size_bytes: int
    actor: str
    reason: str
    forget: bool
    lead_term: int
    def __init__(self, expected_epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., model: _Optional[str] = ..., source: _Optional[str] = ..., size_bytes: _Optional[int] = ..., actor: _Optional[str] = ..., reason: _Optional[str] = ..., forget: _Optional[bool] = ..., lead_term: _Optional[int] = ...) -> None: ...

class AssignModelResponse(_message.Message):
    __slots__ = ("assignment", "expected_ns")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_NS_FIELD_NUMBER: _ClassVar[int]
    assignment: _common_pb2.Assignment
    expected_ns: int
    def __init__(self, assignment: _Optional[_Union[_common_pb2.Assignment, _Mapping]] = ..., expected_ns: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_ms", "actor", "force")
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    actor: str
    force: bool
    def __init__(self, deadline_ms: _Optional[int] = ..., actor: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("finished", "aborted")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    finished: int
    aborted: int
    def __init__(self, finished: _Optional[int] = ..., aborted: _Optional[int] = ...) -> None: ...

class TunePrefillRequest(_message.Message):
    __slots__ = ("most_tokens", "limit_ms", "measure_only", "tpot_target_us", "set_tokens", "kept", "actor")
    MOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    MEASURE_ONLY_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_US_FIELD_NUMBER: _ClassVar[int]
    SET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    most_tokens: int
    limit_ms: int
    measure_only: bool
    tpot_target_us: int
    set_tokens: int
    kept: bool
    actor: str
    def __init__(self, most_tokens: _Optional[int] = ..., limit_ms: _Optional[int] = ..., measure_only: _Optional[bool] = ..., tpot_target_us: _Optional[int] = ..., set_tokens: _Optional[int] = ..., kept: _Optional[bool] = ..., actor: _Optional[str] = ...) -> None: ...

class TunePrefillResponse(_message.Message):
    __slots__ = ("chunk_tokens", "chunk_tokens_before", "plateau_tokens_per_s", "curve", "prompt_ns", "prompt_ns_before", "decode_batch", "chunk_tokens_default", "prompt_ns_default", "measured_unix_ns", "truncated")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    PLATEAU_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    DECODE_BATCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    MEASURED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    chunk_tokens_before: int
    plateau_tokens_per_s: float
    curve: _containers.RepeatedCompositeFieldContainer[TunePoint]
    prompt_ns: int
    prompt_ns_before: int
    decode_batch: int
    chunk_tokens_default: int
    prompt_ns_default: int
    measured_unix_ns: int
    truncated: bool
    def __init__(self, chunk_tokens: _Optional[int] = ..., chunk_tokens_before: _Optional[int] = ..., plateau_tokens_per_s: _Optional[float] = ..., curve: _Optional[_Iterable[_Union[TunePoint, _Mapping]]] = ..., prompt_ns: _Optional[int] = ..., prompt_ns_before: _Optional[int] = ..., decode_batch: _Optional[int] = ..., chunk_tokens_default: _Optional[int] = ..., prompt_ns_default: _Optional[int] = ..., measured_unix_ns: _Optional[int] = ..., truncated: _Optional[bool] = ...) -> None: ...

class TunePoint(_message.Message):
    __slots__ = ("tokens", "measured_tokens_per_s", "fitted_tokens_per_s")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    FITTED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    measured_tokens_per_s: float
    fitted_tokens_per_s: float
    def __init__(self, tokens: _Optional[int] = ..., measured_tokens_per_s: _Optional[float] = ..., fitted_tokens_per_s: _Optional[float] = ...) -> None: ...

class PrefillCurve(_message.Message):
    __slots__ = ("chunk_tokens", "plateau_tokens_per_s", "curve", "step_time", "unix_ns", "scatter")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLATEAU_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    SCATTER_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    plateau_tokens_per_s: float
    curve: _containers.RepeatedCompositeFieldContainer[TunePoint]
    step_time: _common_pb2.StepTime
    unix_ns: int
    scatter: float
    def __init__(self, chunk_tokens: _Optional[int] = ..., plateau_tokens_per_s: _Optional[float] = ..., curve: _Optional[_Iterable[_Union[TunePoint, _Mapping]]] = ..., step_time: _Optional[_Union[_common_pb2.StepTime, _Mapping]] = ..., unix_ns: _Optional[int] = ..., scatter: _Optional[float] = ...) -> None: ...

class TuneDecodeRequest(_message.Message):
    __slots__ = ("tpot_target_us", "context_tokens")
    TPOT_TARGET_US_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tpot_target_us: int
    context_tokens: int
    def __init__(self, tpot_target_us: _Optional[int] = ..., context_tokens: _Optional[int] = ...) -> None: ...

class TuneDecodeResponse(_message.Message):
    __slots__ = ("batch", "step_ns", "next_step_ns", "max_sequences", "steps", "error_p50")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_NS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ERROR_P50_FIELD_NUMBER: _ClassVar[int]
    batch: int
    step_ns: int
    next_step_ns: int
    max_sequences: int
    steps: int
    error_p50: float
    def __init__(self, batch: _Optional[int] = ..., step_ns: _Optional[int] = ..., next_step_ns: _Optional[int] = ..., max_sequences: _Optional[int] = ..., steps: _Optional[int] = ..., error_p50: _Optional[float] = ...) -> None: ...
