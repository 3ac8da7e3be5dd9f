"""Engine steps in telemetry: rows for who makes or reads them one by one, columns on the wire; steps as
`/v1/steps` reports them. Pure."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepColumns

ENTRY_BYTES: Final = 8
"""Columns are those of an array of "Q" on every machine that has a GPU: their bytes go to and fro as they are."""


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


COLUMN_NAMES: Final = StepRow._fields
# Attributes of protobuf's are read in C by this, several times faster than one by one.
_COLUMNS: Final = attrgetter(*COLUMN_NAMES)


def step_columns(rows: Iterable[StepRow]) -> StepColumns:
    """Rows side by side; what is 0 in all of them is left out."""
    columns = zip(*rows, strict=True)
    named = ((name, array("Q", column)) for name, column in zip(COLUMN_NAMES, columns, strict=False))
    return StepColumns(**{name: column.tobytes() for name, column in named if any(column)})


def whole_columns(steps: StepColumns) -> list[bytes]:
    """All columns in the order of `StepRow`, zeros for what was left out; raises ValueError where they differ in
    length."""
    columns: tuple[bytes, ...] = _COLUMNS(steps)
    length = len(columns[0])
    zeros = bytes(length)
    whole = [column or zeros for column in columns]
    if length % ENTRY_BYTES == 0 and {*map(len, whole)} == {length}:
        return whole
    lengths = ", ".join(f"{name} {len(column)}" for name, column in zip(COLUMN_NAMES, columns, strict=True) if column)
    raise ValueError(f"columns of unlike length in bytes: {lengths}")


def step_rows(steps: StepColumns) -> list[StepRow]:
    """The inverse of `step_columns`; raises ValueError where columns differ in length."""
    return list(map(StepRow._make, zip(*(array("Q", column) for column in whole_columns(steps)), strict=True)))


def step_count(steps: StepColumns) -> int:
    """How many steps there are."""
    return len(steps.start_unix_ns) // ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """An engine step."""

    start_unix_ns: int
    end_unix_ns: int
    """As far as it is known to have run, while it runs."""
    running: bool
    kind: str
    """prefill, decode or mixed."""
    prefill_share: float
    """Part of its time that counts as prefill, 0..1: 1 and 0 but for mixed steps."""
    prefill_tokens: int
    prefill_sequences: int
    decode_sequences: int
    decode_kv_tokens: int
    """Tokens whose KV it read for decode, over all sequences."""
    prefill_ns: int
    """Of it, in the window's covered time."""
    decode_ns: int
