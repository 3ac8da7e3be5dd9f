"""Engine steps in telemetry: rows in memory, columns on the wire, and the form of `/v1/steps`. Pure."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepColumns

# Columns have the layout of an array of "Q" on every machine that has a GPU, so their bytes are sent as they are.
ENTRY_BYTES: Final = 8


class StepRow(NamedTuple):
    """One step; its fields are the columns of `StepColumns`, where they are documented."""

    start_unix_ns: int
    end_unix_ns: int = 0
    prefill_tokens: int = 0
    prefill_sequences: int = 0
    prefill_context_tokens: int = 0
    decode_sequences: int = 0
    decode_kv_tokens: int = 0
    prefill_squared_tokens: int = 0
    epoch: int = 0
    waiting: int = 0
    waiting_prefill_tokens: int = 0
    encoded_images: int = 0


COLUMN_NAMES: Final = StepRow._fields
# Attributes of protobuf's are read in C by this, several times faster than one by one.
_COLUMNS: Final = attrgetter(*COLUMN_NAMES)


def step_columns(rows: Iterable[StepRow]) -> StepColumns:
    """Convert rows to columns, leaving out columns that are all zeros."""
    columns = zip(*rows, strict=True)
    named = ((name, array("Q", column)) for name, column in zip(COLUMN_NAMES, columns, strict=False))
    return StepColumns(**{name: column.tobytes() for name, column in named if any(column)})


def sent_columns(steps: StepColumns) -> tuple[bytes, ...]:
    """Return all columns in the order of `StepRow`; omitted ones are empty. Raise ValueError if lengths differ."""
    columns: tuple[bytes, ...] = _COLUMNS(steps)
    length = len(columns[0])
    if length % ENTRY_BYTES == 0 and {0, length}.issuperset(map(len, columns)):
        return columns
    lengths = ", ".join(f"{name} {len(column)}" for name, column in zip(COLUMN_NAMES, columns, strict=True) if column)
    raise ValueError(f"columns of different lengths in bytes: {lengths}")


def whole_columns(steps: StepColumns) -> list[bytes]:
    """Return all columns in the order of `StepRow`, with zeros for omitted ones. Raise ValueError if lengths differ."""
    columns = sent_columns(steps)
    zeros = bytes(len(columns[0]))
    return [column or zeros for column in columns]


def step_rows(steps: StepColumns) -> list[StepRow]:
    """Convert columns to rows. Raise ValueError if their lengths differ."""
    return list(map(StepRow._make, zip(*(array("Q", column) for column in whole_columns(steps)), strict=True)))


def step_count(steps: StepColumns) -> int:
    return len(steps.start_unix_ns) // ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class ReportedStep:
    start_unix_ns: int
    end_unix_ns: int
    """The end of a finished step, or the latest time at which a running step was observed."""
    running: bool
    kind: str
    """The phase of the step's work: prefill, decode, mixed, or encode for images, whose time counts as prefill."""
    prefill_share: float
    """The share of the step that counts as prefill, 0..1; 1 or 0 except for mixed steps."""
    prefill_tokens: int
    prefill_sequences: int
    decode_sequences: int
    decode_kv_tokens: int
    """The tokens whose KV was read for decode, over all sequences."""
    prefill_ns: int
    """The worker's prefill time within the window's covered time."""
    decode_ns: int
