from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_OFF: _ClassVar[Mode]
    MODE_ADVISORY: _ClassVar[Mode]
    MODE_ACTIVE: _ClassVar[Mode]
    MODE_AUTO: _ClassVar[Mode]

class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTION_UNSPECIFIED: _ClassVar[Action]
    ACTION_KEEP: _ClassVar[Action]
    ACTION_SET_ROLE: _ClassVar[Action]
    ACTION_ROLE_MOVED: _ClassVar[Action]
    ACTION_SET_MODE: _ClassVar[Action]
    ACTION_SET_BUDGET: _ClassVar[Action]
    ACTION_RECOMMEND: _ClassVar[Action]
    ACTION_SET_LIMITS: _ClassVar[Action]
    ACTION_SCALE: _ClassVar[Action]
MODE_UNSPECIFIED: Mode
MODE_OFF: Mode
MODE_ADVISORY: Mode
MODE_ACTIVE: Mode
MODE_AUTO: Mode
ACTION_UNSPECIFIED: Action
ACTION_KEEP: Action
ACTION_SET_ROLE: Action
ACTION_ROLE_MOVED: Action
ACTION_SET_MODE: Action
ACTION_SET_BUDGET: Action
ACTION_RECOMMEND: Action
ACTION_SET_LIMITS: Action
ACTION_SCALE: Action

class Decision(_message.Message):
    __slots__ = ("planner_id", "incarnation", "sequence", "decided_unix_ns", "mode", "action", "reason", "inputs", "alternatives", "worker_id", "assignment", "actor", "worker_incarnation", "reason_code", "model", "changes", "candidates", "measured", "counterfactual", "scale", "advice", "targets", "leads", "idle_because")
    PLANNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DECIDED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_CODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    COUNTERFACTUAL_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    IDLE_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    planner_id: str
    incarnation: int
    sequence: int
    decided_unix_ns: int
    mode: Mode
    action: Action
    reason: str
    inputs: ClusterSummary
    alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    worker_id: str
    assignment: _common_pb2.Assignment
    actor: str
    worker_incarnation: int
    reason_code: str
    model: str
    changes: _containers.RepeatedCompositeFieldContainer[WorkerChange]
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    measured: Measured
    counterfactual: Counterfactual
    scale: Scale
    advice: Advice
    targets: _containers.RepeatedCompositeFieldContainer[_common_pb2.ModelTarget]
    leads: bool
    idle_because: str
    def __init__(self, planner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., decided_unix_ns: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., action: _Optional[_Union[Action, str]] = ..., reason: _Optional[str] = ..., inputs: _Optional[_Union[ClusterSummary, _Mapping]] = ..., alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., worker_id: _Optional[str] = ..., assignment: _Optional[_Union[_common_pb2.Assignment, _Mapping]] = ..., actor: _Optional[str] = ..., worker_incarnation: _Optional[int] = ..., reason_code: _Optional[str] = ..., model: _Optional[str] = ..., changes: _Optional[_Iterable[_Union[WorkerChange, _Mapping]]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., counterfactual: _Optional[_Union[Counterfactual, _Mapping]] = ..., scale: _Optional[_Union[Scale, _Mapping]] = ..., advice: _Optional[_Union[Advice, _Mapping]] = ..., targets: _Optional[_Iterable[_Union[_common_pb2.ModelTarget, _Mapping]]] = ..., leads: _Optional[bool] = ..., idle_because: _Optional[str] = ...) -> None: ...

class Counterfactual(_message.Message):
    __slots__ = ("method", "over_ms", "without")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    OVER_MS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_FIELD_NUMBER: _ClassVar[int]
    WITH_FIELD_NUMBER: _ClassVar[int]
    method: str
    over_ms: int
    without: Replayed
    def __init__(self, method: _Optional[str] = ..., over_ms: _Optional[int] = ..., without: _Optional[_Union[Replayed, _Mapping]] = ..., **kwargs) -> None: ...

class Replayed(_message.Message):
    __slots__ = ("prefill", "decode", "ttft_ms", "tpot_ms", "served")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    ttft_ms: float
    tpot_ms: float
    served: float
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., served: _Optional[float] = ...) -> None: ...

class Scale(_message.Message):
    __slots__ = ("serving", "standby", "wished", "started_from", "started_to", "actuator")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    WISHED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FROM_FIELD_NUMBER: _ClassVar[int]
    STARTED_TO_FIELD_NUMBER: _ClassVar[int]
    ACTUATOR_FIELD_NUMBER: _ClassVar[int]
    serving: int
    standby: int
    wished: int
    started_from: int
    started_to: int
    actuator: str
    def __init__(self, serving: _Optional[int] = ..., standby: _Optional[int] = ..., wished: _Optional[int] = ..., started_from: _Optional[int] = ..., started_to: _Optional[int] = ..., actuator: _Optional[str] = ...) -> None: ...

class Advice(_message.Message):
    __slots__ = ("kind", "figure", "low", "high", "confidence", "command", "outcome", "came")
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIGURE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CAME_FIELD_NUMBER: _ClassVar[int]
    kind: str
    figure: str
    low: float
    high: float
    confidence: float
    command: str
    outcome: str
    came: float
    def __init__(self, kind: _Optional[str] = ..., figure: _Optional[str] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., confidence: _Optional[float] = ..., command: _Optional[str] = ..., outcome: _Optional[str] = ..., came: _Optional[float] = ...) -> None: ...

class WorkerChange(_message.Message):
    __slots__ = ("worker_id", "worker_incarnation", "assignment", "before")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker_incarnation: int
    assignment: _common_pb2.Assignment
    before: _common_pb2.Assignment
    def __init__(self, worker_id: _Optional[str] = ..., worker_incarnation: _Optional[int] = ..., assignment: _Optional[_Union[_common_pb2.Assignment, _Mapping]] = ..., before: _Optional[_Union[_common_pb2.Assignment, _Mapping]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("prefill", "decode", "prompt_pressure", "decode_pressure", "ttft_ms", "tpot_ms", "served")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    DECODE_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    prompt_pressure: float
    decode_pressure: float
    ttft_ms: float
    tpot_ms: float
    served: float
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., prompt_pressure: _Optional[float] = ..., decode_pressure: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., served: _Optional[float] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("before", "after", "after_ms")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    before: Seen
    after: Seen
    after_ms: int
    def __init__(self, before: _Optional[_Union[Seen, _Mapping]] = ..., after: _Optional[_Union[Seen, _Mapping]] = ..., after_ms: _Optional[int] = ...) -> None: ...

class Seen(_message.Message):
    __slots__ = ("prefill", "decode", "prompt_pressure", "decode_pressure", "waiting_ms", "decodes")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    DECODE_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    prompt_pressure: float
    decode_pressure: float
    waiting_ms: float
    decodes: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., prompt_pressure: _Optional[float] = ..., decode_pressure: _Optional[float] = ..., waiting_ms: _Optional[float] = ..., decodes: _Optional[int] = ...) -> None: ...

class ClusterSummary(_message.Message):
    __slots__ = ("pools", "coverage", "window_ms")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolSummary]
    coverage: float
    window_ms: int
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolSummary, _Mapping]]] = ..., coverage: _Optional[float] = ..., window_ms: _Optional[int] = ...) -> None: ...

class PoolSummary(_message.Message):
    __slots__ = ("model", "role", "workers", "gpus", "busy", "running", "waiting", "waiting_prefill_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: _common_pb2.Role
    workers: int
    gpus: int
    busy: float
    running: int
    waiting: int
    waiting_prefill_tokens: int
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., workers: _Optional[int] = ..., gpus: _Optional[int] = ..., busy: _Optional[float] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("name", "score")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    name: str
    score: float
    def __init__(self, name: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...
