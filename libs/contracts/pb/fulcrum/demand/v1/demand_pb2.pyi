from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DemandTotals(_message.Message):
    __slots__ = ("gateway_id", "incarnation", "told_unix_ns", "counts", "last")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOLD_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    incarnation: int
    told_unix_ns: int
    counts: _containers.RepeatedCompositeFieldContainer[DemandCount]
    last: bool
    def __init__(self, gateway_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., told_unix_ns: _Optional[int] = ..., counts: _Optional[_Iterable[_Union[DemandCount, _Mapping]]] = ..., last: _Optional[bool] = ...) -> None: ...

class DemandCount(_message.Message):
    __slots__ = ("model", "service_class", "tenant", "requests", "known_requests", "prompt_tokens", "cached_tokens", "output_tokens", "ended", "refused", "queue_full")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FULL_FIELD_NUMBER: _ClassVar[int]
    model: str
    service_class: str
    tenant: str
    requests: int
    known_requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ended: int
    refused: int
    queue_full: int
    def __init__(self, model: _Optional[str] = ..., service_class: _Optional[str] = ..., tenant: _Optional[str] = ..., requests: _Optional[int] = ..., known_requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., ended: _Optional[int] = ..., refused: _Optional[int] = ..., queue_full: _Optional[int] = ...) -> None: ...

class CapacityPlan(_message.Message):
    __slots__ = ("metrics_id", "model", "made_unix_ns", "start_unix_s", "step_s", "confidence", "spare_workers", "prefill", "decode")
    METRICS_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MADE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    START_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    SPARE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    metrics_id: str
    model: str
    made_unix_ns: int
    start_unix_s: float
    step_s: float
    confidence: float
    spare_workers: int
    prefill: PoolNeed
    decode: PoolNeed
    def __init__(self, metrics_id: _Optional[str] = ..., model: _Optional[str] = ..., made_unix_ns: _Optional[int] = ..., start_unix_s: _Optional[float] = ..., step_s: _Optional[float] = ..., confidence: _Optional[float] = ..., spare_workers: _Optional[int] = ..., prefill: _Optional[_Union[PoolNeed, _Mapping]] = ..., decode: _Optional[_Union[PoolNeed, _Mapping]] = ...) -> None: ...

class PoolNeed(_message.Message):
    __slots__ = ("surely", "p50", "p95", "asked", "short", "there")
    SURELY_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P95_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    SHORT_FIELD_NUMBER: _ClassVar[int]
    THERE_FIELD_NUMBER: _ClassVar[int]
    surely: _containers.RepeatedScalarFieldContainer[int]
    p50: _containers.RepeatedScalarFieldContainer[int]
    p95: _containers.RepeatedScalarFieldContainer[int]
    asked: _containers.RepeatedScalarFieldContainer[int]
    short: _containers.RepeatedScalarFieldContainer[float]
    there: int
    def __init__(self, surely: _Optional[_Iterable[int]] = ..., p50: _Optional[_Iterable[int]] = ..., p95: _Optional[_Iterable[int]] = ..., asked: _Optional[_Iterable[int]] = ..., short: _Optional[_Iterable[float]] = ..., there: _Optional[int] = ...) -> None: ...
