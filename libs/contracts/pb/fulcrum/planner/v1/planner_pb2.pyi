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

class Decision(_message.Message):
    __slots__ = ("planner_id", "incarnation", "sequence", "decided_unix_ns", "mode", "action", "reason", "inputs", "alternatives", "worker_id", "assignment", "actor", "worker_incarnation")
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
    def __init__(self, planner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., decided_unix_ns: _Optional[int] = ..., mode: _Optional[_Union[Mode, str]] = ..., action: _Optional[_Union[Action, str]] = ..., reason: _Optional[str] = ..., inputs: _Optional[_Union[ClusterSummary, _Mapping]] = ..., alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., worker_id: _Optional[str] = ..., assignment: _Optional[_Union[_common_pb2.Assignment, _Mapping]] = ..., actor: _Optional[str] = ..., worker_incarnation: _Optional[int] = ...) -> None: ...

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
