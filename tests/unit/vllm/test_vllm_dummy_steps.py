"""Tests without vLLM of the ring in which EngineCore records dummy steps."""

import tempfile
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from libs.engine.reports import EngineEvent, merge
from libs.engine.vllm.step_reports import NOWHEN, RING, SpanRing, count_in


@given(st.lists(st.integers(0, 9), max_size=20))
def test_each_step_is_read_once_in_order(runs: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer, reader = SpanRing(Path(folder) / "ring"), SpanRing(Path(folder) / "ring")
        number = 0
        for run in runs:
            new = [(number + each + 1, number + each + 2) for each in range(run)]
            for span in new:
                writer.ended(*span)
            number += run
            assert list(reader.take()) == new
        writer.close()
        reader.close()


@pytest.mark.parametrize("run", [RING - 1, RING, RING + 1, 3 * RING])
def test_steps_not_read_in_time_are_counted_without_their_time(tmp_path: Path, run: int) -> None:
    writer, reader = SpanRing(tmp_path / "ring"), SpanRing(tmp_path / "ring")
    for number in range(1, run + 1):
        writer.ended(number, number + 1)
    found = reader.take()
    kept = min(run, RING - 1)  # the writer may be about to overwrite the oldest
    assert found == (*[NOWHEN] * (run - kept), *((each, each + 1) for each in range(run - kept + 1, run + 1)))
    assert reader.take() == ()


def test_a_call_is_counted_once_it_has_ended_and_not_if_it_fails(tmp_path: Path) -> None:
    class Core:
        fails = False

        def execute_dummy_batch(self) -> None:
            if self.fails:
                raise RuntimeError("the device is lost")

    class Rank(Core):
        pass

    steps, seen = SpanRing(tmp_path / "ring"), SpanRing(tmp_path / "ring")
    count_in(Core, steps)
    before_ns = time.time_ns()
    Rank().execute_dummy_batch()
    ((start_ns, end_ns),) = seen.take()
    assert before_ns <= start_ns <= end_ns <= time.time_ns()
    rank = Rank()
    rank.fails = True
    with pytest.raises(RuntimeError, match="lost"):
        rank.execute_dummy_batch()
    assert seen.take() == ()


def test_unread_events_preserve_dummy_steps() -> None:
    merged = merge(EngineEvent(dummy_steps=((1, 2),)), EngineEvent(dummy_steps=((3, 4),)))
    assert merged == EngineEvent(dummy_steps=((1, 2), (3, 4)))
