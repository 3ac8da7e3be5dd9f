"""Properties of steps on the wire: columns round-trip, and malformed ones are errors."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepColumns
from libs.contracts.step_row import COLUMN_NAMES, StepRow, step_columns, step_count, step_rows
from libs.telemetry.columns import prefill_shares
from libs.telemetry.steps import COUNTS, StepCounts
from libs.telemetry.timeline import BatchOutcome, Timeline
from libs.testing.workers.telemetry import at, step_batch

counts = st.integers(0, 2**64 - 1) | st.just(0)
rows = st.lists(st.builds(StepRow, st.integers(1, 2**63), *[counts] * (len(COLUMN_NAMES) - 1)), max_size=8)


@given(rows)
def test_rows_round_trip_over_the_wire(reported: list[StepRow]) -> None:
    columns = StepColumns.FromString(step_columns(reported).SerializeToString())
    assert step_rows(columns) == reported
    assert step_count(columns) == len(reported)
    assert all(any(getattr(row, name) for row in reported) for name in COLUMN_NAMES if getattr(columns, name))


def test_rows_have_the_fields_of_the_message() -> None:
    assert COLUMN_NAMES[COUNTS] == StepCounts._fields
    assert list(COLUMN_NAMES) == [field.name for field in StepColumns.DESCRIPTOR.fields]


@pytest.mark.parametrize(
    ("name", "column"),
    [("start_unix_ns", b""), *itertools.product(COLUMN_NAMES, [b"1", bytes(8), bytes(9), bytes(24)])],
)
@pytest.mark.parametrize("first", [True, False], ids=["of a stranger", "of one that is known"])
def test_columns_of_different_lengths_are_malformed_and_change_nothing(name: str, column: bytes, first: bool) -> None:
    timeline = Timeline(prefill_shares)
    if not first:
        timeline.add(step_batch(1, (0, 100)))
    batch = step_batch(2, (100, 200))
    batch.steps.CopyFrom(step_columns([StepRow(at(110), at(120), decode_sequences=1), StepRow(at(130), at(140))]))
    setattr(batch.steps, name, column)
    assert timeline.add(batch) is BatchOutcome.MALFORMED
    assert timeline.phases(at(100), at(200)).covered_ns == 0
    assert timeline.add(step_batch(2, (100, 200))) is BatchOutcome.COUNTED
