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
    OUTCOME_COMPLETED: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
    OUTCOME_EXPIRED: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_COMPLETED: Outcome
OUTCOME_CANCELLED: Outcome
OUTCOME_EXPIRED: Outcome
OUTCOME_FAILED: Outcome

class JobEvent(_message.Message):
    __slots__ = ("job_id", "at_unix_ns", "created", "started", "progress", "cancel_asked", "finished", "dealt", "foretold", "assembled", "snapshot", "look_back", "waits")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_ASKED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    DEALT_FIELD_NUMBER: _ClassVar[int]
    FORETOLD_FIELD_NUMBER: _ClassVar[int]
    ASSEMBLED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LOOK_BACK_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    at_unix_ns: int
    created: Created
    started: Started
    progress: Progress
    cancel_asked: CancelAsked
    finished: Finished
    dealt: Dealt
    foretold: Foretold
    assembled: Assembled
    snapshot: Snapshot
    look_back: LookBack
    waits: Waits
    def __init__(self, job_id: _Optional[str] = ..., at_unix_ns: _Optional[int] = ..., created: _Optional[_Union[Created, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., cancel_asked: _Optional[_Union[CancelAsked, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., dealt: _Optional[_Union[Dealt, _Mapping]] = ..., foretold: _Optional[_Union[Foretold, _Mapping]] = ..., assembled: _Optional[_Union[Assembled, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., look_back: _Optional[_Union[LookBack, _Mapping]] = ..., waits: _Optional[_Union[Waits, _Mapping]] = ...) -> None: ...

class Created(_message.Message):
    __slots__ = ("input_file_id", "endpoint", "completion_window", "expires_unix_ns", "metadata", "tenant", "priority", "input_topic", "output_topic", "error_topic", "models")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INPUT_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOPIC_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOPIC_FIELD_NUMBER: _ClassVar[int]
    ERROR_TOPIC_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    input_file_id: str
    endpoint: str
    completion_window: str
    expires_unix_ns: int
    metadata: _containers.ScalarMap[str, str]
    tenant: str
    priority: int
    input_topic: str
    output_topic: str
    error_topic: str
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, input_file_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., completion_window: _Optional[str] = ..., expires_unix_ns: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., input_topic: _Optional[str] = ..., output_topic: _Optional[str] = ..., error_topic: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("lines", "results_since", "input_file_id", "repeats")
    LINES_FIELD_NUMBER: _ClassVar[int]
    RESULTS_SINCE_FIELD_NUMBER: _ClassVar[int]
    INPUT_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    lines: int
    results_since: _containers.RepeatedScalarFieldContainer[int]
    input_file_id: str
    repeats: bool
    def __init__(self, lines: _Optional[int] = ..., results_since: _Optional[_Iterable[int]] = ..., input_file_id: _Optional[str] = ..., repeats: _Optional[bool] = ...) -> None: ...

class Dealt(_message.Message):
    __slots__ = ("shares", "lines", "next_byte", "next_line", "gone")
    SHARES_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    NEXT_BYTE_FIELD_NUMBER: _ClassVar[int]
    NEXT_LINE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    shares: int
    lines: int
    next_byte: int
    next_line: int
    gone: bool
    def __init__(self, shares: _Optional[int] = ..., lines: _Optional[int] = ..., next_byte: _Optional[int] = ..., next_line: _Optional[int] = ..., gone: _Optional[bool] = ...) -> None: ...

class Foretold(_message.Message):
    __slots__ = ("end_unix_ns", "late")
    END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    end_unix_ns: int
    late: bool
    def __init__(self, end_unix_ns: _Optional[int] = ..., late: _Optional[bool] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("share", "completed", "failed", "whole", "note")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    share: int
    completed: int
    failed: int
    whole: bool
    note: str
    def __init__(self, share: _Optional[int] = ..., completed: _Optional[int] = ..., failed: _Optional[int] = ..., whole: _Optional[bool] = ..., note: _Optional[str] = ...) -> None: ...

class LookBack(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: int
    def __init__(self, token: _Optional[int] = ...) -> None: ...

class Assembled(_message.Message):
    __slots__ = ("results_next", "output", "errors", "expired", "places", "attempt", "cancelled")
    RESULTS_NEXT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    results_next: _containers.RepeatedScalarFieldContainer[int]
    output: AssembledFile
    errors: AssembledFile
    expired: bool
    places: int
    attempt: int
    cancelled: bool
    def __init__(self, results_next: _Optional[_Iterable[int]] = ..., output: _Optional[_Union[AssembledFile, _Mapping]] = ..., errors: _Optional[_Union[AssembledFile, _Mapping]] = ..., expired: _Optional[bool] = ..., places: _Optional[int] = ..., attempt: _Optional[int] = ..., cancelled: _Optional[bool] = ...) -> None: ...

class AssembledFile(_message.Message):
    __slots__ = ("lines", "parts")
    LINES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    lines: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lines: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...

class Waits(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class CancelAsked(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("created", "created_unix_ns", "started", "started_unix_ns", "dealt", "foretold", "assembled", "cancel_unix_ns", "finished", "finished_unix_ns", "completed", "failed", "answered_unix_ns", "open_shares", "whole_below", "whole_above", "waits")
    CREATED_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    DEALT_FIELD_NUMBER: _ClassVar[int]
    FORETOLD_FIELD_NUMBER: _ClassVar[int]
    ASSEMBLED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    OPEN_SHARES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_BELOW_FIELD_NUMBER: _ClassVar[int]
    WHOLE_ABOVE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    created: Created
    created_unix_ns: int
    started: Started
    started_unix_ns: int
    dealt: Dealt
    foretold: Foretold
    assembled: Assembled
    cancel_unix_ns: int
    finished: Finished
    finished_unix_ns: int
    completed: int
    failed: int
    answered_unix_ns: int
    open_shares: _containers.RepeatedCompositeFieldContainer[Progress]
    whole_below: int
    whole_above: _containers.RepeatedCompositeFieldContainer[Progress]
    waits: Waits
    def __init__(self, created: _Optional[_Union[Created, _Mapping]] = ..., created_unix_ns: _Optional[int] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., started_unix_ns: _Optional[int] = ..., dealt: _Optional[_Union[Dealt, _Mapping]] = ..., foretold: _Optional[_Union[Foretold, _Mapping]] = ..., assembled: _Optional[_Union[Assembled, _Mapping]] = ..., cancel_unix_ns: _Optional[int] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., finished_unix_ns: _Optional[int] = ..., completed: _Optional[int] = ..., failed: _Optional[int] = ..., answered_unix_ns: _Optional[int] = ..., open_shares: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ..., whole_below: _Optional[int] = ..., whole_above: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ..., waits: _Optional[_Union[Waits, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("outcome", "completed", "failed", "output_file_id", "error_file_id", "error_code", "error_message", "error_param")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_PARAM_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    completed: int
    failed: int
    output_file_id: str
    error_file_id: str
    error_code: str
    error_message: str
    error_param: str
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., completed: _Optional[int] = ..., failed: _Optional[int] = ..., output_file_id: _Optional[str] = ..., error_file_id: _Optional[str] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., error_param: _Optional[str] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("share_id", "job_id", "number", "input_file_id", "endpoint", "first_line", "lines", "first_byte", "bytes", "repeats", "expires_unix_ns", "first_place", "tenant", "output_topic", "error_topic", "models")
    SHARE_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INPUT_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    FIRST_LINE_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PLACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOPIC_FIELD_NUMBER: _ClassVar[int]
    ERROR_TOPIC_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    share_id: str
    job_id: str
    number: int
    input_file_id: str
    endpoint: str
    first_line: int
    lines: int
    first_byte: int
    bytes: int
    repeats: _containers.RepeatedScalarFieldContainer[int]
    expires_unix_ns: int
    first_place: int
    tenant: str
    output_topic: str
    error_topic: str
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, share_id: _Optional[str] = ..., job_id: _Optional[str] = ..., number: _Optional[int] = ..., input_file_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., first_line: _Optional[int] = ..., lines: _Optional[int] = ..., first_byte: _Optional[int] = ..., bytes: _Optional[int] = ..., repeats: _Optional[_Iterable[int]] = ..., expires_unix_ns: _Optional[int] = ..., first_place: _Optional[int] = ..., tenant: _Optional[str] = ..., output_topic: _Optional[str] = ..., error_topic: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("body",)
    BODY_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    def __init__(self, body: _Optional[bytes] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("job_id", "place", "custom_id", "ok", "answer", "expired", "cancelled")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_ID_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    place: int
    custom_id: str
    ok: bool
    answer: bytes
    expired: bool
    cancelled: bool
    def __init__(self, job_id: _Optional[str] = ..., place: _Optional[int] = ..., custom_id: _Optional[str] = ..., ok: _Optional[bool] = ..., answer: _Optional[bytes] = ..., expired: _Optional[bool] = ..., cancelled: _Optional[bool] = ...) -> None: ...
