from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class AuditEvent(_message.Message):
    __slots__ = ("event_id", "at_unix_ns", "service", "actor", "tenant", "action", "detail", "status", "role", "repeats")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    at_unix_ns: int
    service: str
    actor: str
    tenant: str
    action: str
    detail: str
    status: int
    role: str
    repeats: int
    def __init__(self, event_id: _Optional[str] = ..., at_unix_ns: _Optional[int] = ..., service: _Optional[str] = ..., actor: _Optional[str] = ..., tenant: _Optional[str] = ..., action: _Optional[str] = ..., detail: _Optional[str] = ..., status: _Optional[int] = ..., role: _Optional[str] = ..., repeats: _Optional[int] = ...) -> None: ...
