"""The valid range of every field of messages from outside: one table, and checks compiled from it.

`libs/bus/codec.py` applies them to each record when it is decoded, so that consumers only see values that Fulcrum's own
writers could have sent. A field without an entry has the range of its type: see `_default`. The ranges bound the work
that one record can cause. Checks that depend on the time of day or on earlier records is left to the consumer.

protovalidate 2.1 was tried instead. It takes 17 us for the thirteen counts of a `Load`; this module takes 4, and
parsing them 1. On ten thousand step batches a second that is a sixth of a core more.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import inf
from operator import attrgetter, le
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from libs.policy.batch import SHARE_LINES
from libs.policy.roles import MAX_BUDGET_TOKENS

# The year 2116.
MOST_UNIX_NS: Final = 2**62 - 1
# The largest integer that SQLite and arrays of int64 hold.
MOST_INT64: Final = 2**63 - 1
# Largest count of one process; sums over all workers or gateways then fit 64 bits.
MOST_COUNTED: Final = 2**49
MOST_CHARS: Final = 16_384
# Longest name that consumers store, or use as a key.
MOST_NAME_CHARS: Final = 1_024
# Most elements of a repeated field.
MOST_ITEMS: Final = 65_536
# GPUs of one worker, which are the weight of the worker in cluster figures.
MOST_GPUS: Final = 65_536
MOST_JOB_LINES: Final = 2**24
# Length of the note that a broker stores beside an offset.
MOST_NOTE_CHARS: Final = 4_096
# A record of at most this size cannot have a text or list that is too long.
_SHORT_BYTES: Final = MOST_NAME_CHARS


class Range(NamedTuple):
    """The range of a number, both ends included."""

    least: float = 0
    most: float = MOST_INT64


class Length(NamedTuple):
    """The maximum number of characters, bytes or elements of a field, and the range of each element."""

    most: int
    each: Range | None = None


class Pattern(NamedTuple):
    """A regular expression that a whole text must match."""

    words: str


ANY: Final = Range(-inf, inf)
_COUNT: Final = Range(0, MOST_COUNTED)
_SHARE: Final = Range(0, 1)
_WORKERS: Final = Range(0, 100_000)
_LINES: Final = Range(0, MOST_JOB_LINES)
_PRESSURE: Final = Range(0, 1e6)
_NAME: Final = Length(MOST_NAME_CHARS)
_STRETCHES: Final = Length(4_096, _WORKERS)
_NOTE: Final = Pattern(rf"(?!.{{{MOST_NOTE_CHARS + 1}}})([0-9a-f]+/[0-9a-f]+)?")
_COUNTS: Final = ("completed", "failed")

# By message, without "fulcrum.", then by field.
RANGES: Final[Mapping[str, Mapping[str, Range | Length | Pattern]]] = {
    "common.v1.Worker": {
        "gpus": Range(0, MOST_GPUS), "nodes": Range(0, MOST_GPUS), "gpu_uuids": Length(1_024), "gpu_share": _SHARE,
        "node": _NAME, "group": _NAME, "incarnation": ANY,
    },
    "common.v1.Capabilities": {
        "block_size_tokens": Range(0, 2**16), "kv_blocks": Range(0, 2**31), "kv_block_bytes": Range(0, 2**40),
        "max_context_tokens": Range(0, 2**31), "max_sequences": Range(0, 2**24), "chunk_tokens": Range(0, 2**24),
    },
    "common.v1.PoolWorker": {"asleep": Length(1_024)},
    "common.v1.Assignment": {"model": _NAME, "budget_tokens": Range(0, MAX_BUDGET_TOKENS)},
    "common.v1.Load": dict.fromkeys(
        ("waiting_prefill_tokens", "preemptions", "recomputed_tokens", "refused_kv_pulls", "images_used",
         "images_encoded", "image_encode_ns", "image_cache_bytes", "waiting_encode_ns"), _COUNT
    ),
    "common.v1.Compute": dict.fromkeys(
        ("layer_parameters", "head_parameters", "kv_state_bytes"), Range(0, 2**53)
    ) | dict.fromkeys(("peak_flops_per_s", "peak_bytes_per_s"), Range(0, 1e21)),
    "common.v1.StepTime": dict.fromkeys(
        ("prefill_floor_ns", "prefill_fixed_ns", "prefill_token_ns", "prefill_token_squared_ns", "decode_fixed_ns",
         "decode_sequence_ns", "decode_kv_token_ns", "decode_matrix_ns", "kv_token_ns",
         "decode_wide_ns", "graph_exit_ns"), Range(0, 1e15),
    ) | {"interference": _SHARE},
    "telemetry.v1.StepBatch": {
        "worker_id": _NAME, "node": _NAME, "engine": _NAME, "group": _NAME, "gpus": Range(0, MOST_GPUS),
        "sequence": Range(0, MOST_UNIX_NS), "incarnation": Range(0, MOST_UNIX_NS), "dropped_batches": _COUNT,
    },
    "telemetry.v1.DummySteps": {"steps": _COUNT},
    "telemetry.v1.GpuReading": {"uuid": _NAME, "name": _NAME},
    "telemetry.v1.KvTransfer": {"request_id": _NAME, "from_worker_id": _NAME, "bytes": _COUNT},
    "telemetry.v1.RequestEvent": dict.fromkeys(
        ("request_id", "gateway_id", "tenant", "service_class", "model", "prefill_worker", "decode_worker",
         "finish_reason", "error_code", "traceparent"), _NAME,
    ) | dict.fromkeys(
        ("queue_ns", "ttft_ns", "decode_ns", "predicted_ttft_ns", "second_token_ns"), Range(0, MOST_UNIX_NS)
    ),
    "telemetry.v1.GatewayQueues": {"gateway_id": _NAME, "queues": Length(4_096)},
    "telemetry.v1.ModelQueue": {"model": _NAME} | dict.fromkeys(
        ("prefill_tokens", "decode_prompt_tokens", "hopeful_tokens", "arrived_tokens", "batch_tokens", "images",
         "arrived_images"),
        _COUNT,
    ),
    "telemetry.v1.SharedWindows": {"metrics_id": _NAME, "workers": Length(4_096), "windows": Length(4_096)},
    "telemetry.v1.SharedWorker": {"lost_batches": _COUNT, "running_step_share": Range(0, 2**23)},
    "telemetry.v1.FleetLoads": {"metrics_id": _NAME, "worker_ids": Length(4_096), "windows": Length(4_096)},
    "telemetry.v1.ModelAssessment": {"model": _NAME} | dict.fromkeys(("prefill", "decode"), _WORKERS) | dict.fromkeys(
        ("prefill_pressure", "decode_pressure"), _PRESSURE
    ) | {"kv_tokens": _COUNT, "missing_workers": _WORKERS, "chunk_tokens": Range(0, 2**24)},
    "telemetry.v1.AssessedWork": dict.fromkeys(
        ("prompts", "held_prompts"), _PRESSURE
    ) | dict.fromkeys(("decodes", "kv_tokens", "held", "held_kv_tokens"), _COUNT) | {"waiting_ns": Range(0, 1e18)},
    "telemetry.v1.AdvisedRoles": {
        "advice_id": _NAME, "cause": _NAME, "worker_ids": Length(4_096), "budget_tokens": Range(0, MAX_BUDGET_TOKENS),
        "pressure_then": _PRESSURE,
    },
    "demand.v1.DemandTotals": {"gateway_id": _NAME, "counts": Length(1_024)},
    "demand.v1.DemandCount": {"model": _NAME, "service_class": _NAME, "tenant": _NAME} | dict.fromkeys(
        ("requests", "known_requests", "prompt_tokens", "cached_tokens", "output_tokens", "ended", "refused",
         "queue_full"), _COUNT,
    ),
    "demand.v1.CapacityPlan": {
        "metrics_id": _NAME, "model": _NAME, "start_unix_s": Range(0, MOST_UNIX_NS / 1e9), "step_s": Range(1e-3, 1e7),
        "confidence": _SHARE, "spare_workers": _WORKERS,
    },
    "demand.v1.PoolNeed": {
        "surely": _STRETCHES, "p50": _STRETCHES, "p95": _STRETCHES, "asked": _STRETCHES,
        "short": Length(4_096, _SHARE), "there": _WORKERS,
    },
    "planner.v1.Decision": dict.fromkeys(
        ("planner_id", "worker_id", "actor", "reason_code", "model"), _NAME
    ) | {"sequence": _COUNT},
    "planner.v1.ClusterSummary": {"pools": Length(4_096), "coverage": _SHARE},
    "alerts.v1.AlertEvent": {"metrics_id": _NAME, "name": _NAME, "labels": Length(64)},
    "alerts.v1.AlertSilence": {"silence_id": _NAME, "alert_name": _NAME, "actor": _NAME, "labels": Length(64)},
    "audit.v1.AuditEvent": dict.fromkeys(("event_id", "service", "actor", "tenant"), _NAME),
    "batch.v1.JobEvent": {"job_id": _NAME},
    "batch.v1.Created": dict.fromkeys(
        ("input_file_id", "endpoint", "completion_window", "tenant", "input_topic", "output_topic", "error_topic"),
        _NAME,
    ) | {"metadata": Length(64), "priority": Range(-(2**31), 2**31 - 1)},
    "batch.v1.Started": {"lines": _LINES, "results_since": Length(4_096, Range()), "input_file_id": _NAME},
    "batch.v1.Dealt": {"lines": _LINES, "next_byte": _COUNT, "next_line": _COUNT, "shares": _LINES},
    "batch.v1.Progress": {"note": _NOTE, "share": _LINES, **dict.fromkeys(_COUNTS, Range(0, SHARE_LINES))},
    "batch.v1.Assembled": {"results_next": Length(4_096, Range())},
    "batch.v1.AssembledFile": {"lines": _LINES},
    "batch.v1.Finished": dict.fromkeys(_COUNTS, _LINES),
    "batch.v1.Snapshot": {"whole_below": _LINES} | dict.fromkeys(_COUNTS, _LINES),
    "batch.v1.Share": dict.fromkeys(
        ("share_id", "job_id", "input_file_id", "endpoint", "tenant", "output_topic", "error_topic"), _NAME
    ) | {
        "number": _LINES, "first_line": _COUNT, "first_byte": _COUNT, "bytes": _COUNT, "first_place": _LINES,
        "lines": Range(0, SHARE_LINES), "repeats": Length(SHARE_LINES, Range(0, SHARE_LINES - 1)),
    },
    "batch.v1.Submission": {"body": Length(2**24)},
    "batch.v1.Result": {"job_id": _NAME, "place": _LINES, "custom_id": _NAME},
}  # fmt: skip
# Parts that are not checked here, because ten thousand step batches arrive per second, and reading a whole batch takes
# six times as long as parsing it. `libs/telemetry` checks them where it reads them, by arrays of many batches or after
# a change, and `libs/perfmodel/wire.py` checks step times and shapes.
READ_RARELY: Final = {
    "telemetry.v1.StepBatch": (
        "assignment", "load", "steps", "kv_waits", "starved", "kv_transfers", "gpu_readings", "dummy_steps",
        "step_time", "compute", "estimate",
    ),
}  # fmt: skip

_PREFIX: Final = "fulcrum."
_FLOATS: Final = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


def fault_of(message: Message, size_bytes: int) -> str:
    """Return the first field that is out of its range, as "Share.lines", or an empty text if none is.

    `size_bytes` is the message's size on the wire, which bounds its texts and lists.
    """
    kind: Any = type(message)
    return _check_of(kind)(message, size_bytes > _SHORT_BYTES)


Check = Callable[[Any, bool], str]
"""A function that returns the fault of a message. The flag is true if it is large enough for a text or list to be too
long.
"""


@cache
def _check_of(kind: Any) -> Check:
    return _compiled(kind.DESCRIPTOR, {})


def _compiled(descriptor: Descriptor, known: dict[str, Check]) -> Check:
    """Compile the check of a message and of all its parts; `known` holds those already compiled."""
    name = descriptor.full_name.removeprefix(_PREFIX)
    if name in known:
        return known[name]
    ranges = RANGES.get(name, {})
    singles = [field for field in descriptor.fields if not field.is_repeated and not field.message_type]
    numbers = _numbers(descriptor.name, {each.name: _range(each, ranges) for each in singles})
    lengths = _lengths(descriptor, ranges)
    elements = _elements(descriptor, ranges)
    parts = [
        (field.name, attrgetter(field.name), field.is_repeated, _compiled(field.message_type, known))
        for field in descriptor.fields
        if field.message_type and not _is_map(field) and field.name not in READ_RARELY.get(name, ())
    ]

    def check(message: Any, large: bool) -> str:
        if fault := numbers(message):
            return fault
        if elements is not None and (fault := elements(message)):
            return fault
        if large and (fault := lengths(message)):
            return fault
        for part, get, repeated, below in parts:
            if repeated:
                for each in get(message):
                    if fault := below(each, large):
                        return fault
            elif message.HasField(part) and (fault := below(get(message), large)):
                return fault
        return ""

    known[name] = check
    return check


def _numbers(kind: str, found: Mapping[str, Range | None]) -> Callable[[Any], str]:
    """Check single numbers; non-negative ones only against the upper end."""
    ranges = {name: each for name, each in found.items() if each is not None}
    if not ranges:
        return lambda _: ""
    leasts, mosts = zip(*ranges.values(), strict=True)
    get = attrgetter(*ranges)  # reads attributes of protobuf's in C, several times faster than one by one
    alone = len(ranges) == 1
    unsigned = not any(leasts) and all(isinstance(most, int) for most in mosts)

    def check(message: Any) -> str:
        values = (get(message),) if alone else get(message)
        # NaN is in no range.
        if all(map(le, values, mosts)) and (unsigned or all(map(le, leasts, values))):
            return ""
        inside = (least <= value <= most for value, least, most in zip(values, leasts, mosts, strict=True))
        return f"{kind}.{next(name for name, fits in zip(ranges, inside, strict=False) if not fits)}"

    return check


def _lengths(descriptor: Descriptor, ranges: Mapping[str, Range | Length | Pattern]) -> Callable[[Any], str]:
    """Check the lengths of texts, bytes and lists."""
    mosts = {field.name: most for field in descriptor.fields if (most := _most_items(field, ranges)) is not None}
    texts = [(field.name, _is_map(field)) for field in descriptor.fields
             if field.is_repeated and (_is_map(field) or field.type == FieldDescriptor.TYPE_STRING)]  # fmt: skip

    def check(message: Any) -> str:
        for name, most in mosts.items():
            if len(getattr(message, name)) > most:
                return f"{descriptor.name}.{name}"
        for name, is_map in texts:
            found = getattr(message, name)
            every: Iterable[Any] = (*found.keys(), *found.values()) if is_map else found
            if any(isinstance(each, str) and len(each) > MOST_NAME_CHARS for each in every):
                return f"{descriptor.name}.{name}"
        return ""

    return check


def _elements(descriptor: Descriptor, ranges: Mapping[str, Range | Length | Pattern]) -> Callable[[Any], str] | None:
    """Check elements of lists of numbers, and texts that have a pattern; return None if there are neither."""
    patterns = {name: re.compile(each.words) for name, each in ranges.items() if isinstance(each, Pattern)}
    lists = {}
    for field in descriptor.fields:
        if field.is_repeated and not field.message_type:
            length = ranges.get(field.name)
            each = length.each if isinstance(length, Length) and length.each else _default(field)
            if each is not None:
                lists[field.name] = each
    if not patterns and not lists:
        return None

    def check(message: Any) -> str:
        for name, pattern in patterns.items():
            if not pattern.fullmatch(getattr(message, name)):
                return f"{descriptor.name}.{name}"
        for name, (least, most) in lists.items():
            if not all(least <= value <= most for value in getattr(message, name)):
                return f"{descriptor.name}.{name}"
        return ""

    return check


def _range(field: FieldDescriptor, ranges: Mapping[str, Range | Length | Pattern]) -> Range | None:
    """Return the range of a single number, or None if any value of its type is valid."""
    found = ranges.get(field.name)
    return found if isinstance(found, Range) else _default(field)


def _default(field: FieldDescriptor) -> Range | None:
    """Return the range of a number without an entry: times until 2116, counts that fit int64, finite floats.

    Numbers of 32 bits may have any value, as nothing loops over them; fixed64 are random.
    """
    if field.type == FieldDescriptor.TYPE_UINT64:
        return Range(0, MOST_UNIX_NS if field.name.endswith("_unix_ns") else MOST_INT64)
    return Range(-1e300, 1e300) if field.type in _FLOATS else None


def _most_items(field: FieldDescriptor, ranges: Mapping[str, Range | Length | Pattern]) -> int | None:
    found = ranges.get(field.name)
    if isinstance(found, Length):
        return found.most
    if field.is_repeated:
        return MOST_ITEMS
    return MOST_CHARS if field.type == FieldDescriptor.TYPE_STRING else None


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)
