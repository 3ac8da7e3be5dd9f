"""Engine steps in telemetry: rows for who makes or reads them one by one, columns on the wire. Pure."""

from array import array
from collections.abc import Iterable
from typing import Final, NamedTuple

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepColumns

ENTRY_BYTES: Final = 8
"""Columns are those of an array of "Q" on every machine that has a GPU: their bytes go to and fro as they are."""


class StepRow(NamedTuple):
    """One step; its fields are the columns of `StepColumns`, where they are told what they mean."""

    start_unix_ns: int
    end_unix_ns: int = 0
    prefill_tokens: int = 0
    prefill_sequences: int = 0
    prefill_context_tokens: int = 0
    decode_sequences: int = 0
    decode_kv_tokens: int = 0
    epoch: int = 0
    waiting: int = 0
    waiting_prefill_tokens: int = 0
    prefill_squared_tokens: int = 0


NAMES: Final = StepRow._fields


def step_columns(rows: Iterable[StepRow]) -> StepColumns:
    """Rows side by side; what is 0 in all of them is left out."""
    columns = zip(*rows, strict=True)
    named = ((name, array("Q", column)) for name, column in zip(NAMES, columns, strict=False))
    return StepColumns(**{name: column.tobytes() for name, column in named if any(column)})


def step_rows(columns: StepColumns) -> list[StepRow]:
    """The inverse; raises ValueError where columns differ in length."""
    count = step_count(columns)
    told = (array("Q", whole_column(getattr(columns, name), count)) for name in NAMES)
    return list(map(StepRow._make, zip(*told, strict=True)))


def step_count(columns: StepColumns) -> int:
    """How many steps there are."""
    return len(columns.start_unix_ns) // ENTRY_BYTES


def whole_column(column: bytes, count: int) -> bytes:
    """A column of `count` steps, zeros where it was left out; raises ValueError where it is of another length."""
    if len(column) != ENTRY_BYTES * count:
        if column:
            raise ValueError(f"a column of {len(column)} bytes beside {count} steps")
        return bytes(ENTRY_BYTES * count)
    return column
