from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AlertState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALERT_STATE_UNSPECIFIED: _ClassVar[AlertState]
    ALERT_STATE_FIRING: _ClassVar[AlertState]
    ALERT_STATE_RESOLVED: _ClassVar[AlertState]
ALERT_STATE_UNSPECIFIED: AlertState
ALERT_STATE_FIRING: AlertState
ALERT_STATE_RESOLVED: AlertState

class AlertEvent(_message.Message):
    __slots__ = ("alert_id", "metrics_id", "incarnation", "sequence", "state", "name", "severity", "labels", "reason", "started_unix_ns", "ended_unix_ns", "runbook_url")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ALERT_ID_FIELD_NUMBER: _ClassVar[int]
    METRICS_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    ENDED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    RUNBOOK_URL_FIELD_NUMBER: _ClassVar[int]
    alert_id: str
    metrics_id: str
    incarnation: int
    sequence: int
    state: AlertState
    name: str
    severity: str
    labels: _containers.ScalarMap[str, str]
    reason: str
    started_unix_ns: int
    ended_unix_ns: int
    runbook_url: str
    def __init__(self, alert_id: _Optional[str] = ..., metrics_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., state: _Optional[_Union[AlertState, str]] = ..., name: _Optional[str] = ..., severity: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., reason: _Optional[str] = ..., started_unix_ns: _Optional[int] = ..., ended_unix_ns: _Optional[int] = ..., runbook_url: _Optional[str] = ...) -> None: ...

class AlertSilence(_message.Message):
    __slots__ = ("silence_id", "alert_name", "labels", "alert_id", "made_unix_ns", "until_unix_ns", "changed_unix_ns", "actor", "reason", "ended")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SILENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ALERT_NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ALERT_ID_FIELD_NUMBER: _ClassVar[int]
    MADE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    silence_id: str
    alert_name: str
    labels: _containers.ScalarMap[str, str]
    alert_id: str
    made_unix_ns: int
    until_unix_ns: int
    changed_unix_ns: int
    actor: str
    reason: str
    ended: bool
    def __init__(self, silence_id: _Optional[str] = ..., alert_name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., alert_id: _Optional[str] = ..., made_unix_ns: _Optional[int] = ..., until_unix_ns: _Optional[int] = ..., changed_unix_ns: _Optional[int] = ..., actor: _Optional[str] = ..., reason: _Optional[str] = ..., ended: _Optional[bool] = ...) -> None: ...
