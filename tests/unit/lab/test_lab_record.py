"""Tests of `fulcrum lab record`: events of a bus become a trace, complete or up to an interruption."""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from libs.bus.clients import CONNECTION_ERRORS
from libs.cli.lab import record as recording
from libs.cli.lab.record import EventBroker, Recording, collect, find_broker
from libs.cli.main import app
from libs.contracts.errors import InvalidRequest, StartupError
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_OK, OUTCOME_REJECTED, RequestEvent
from libs.contracts.topics import REQUESTS
from libs.lab.study import Note
from libs.lab.traces.read import read_trace
from libs.launch.ready import Ready, write_ready
from libs.testing.memory.broker import MemoryBroker
from libs.testing.memory.bus import MemoryBus

START_NS = 1_700_000_000_000_000_000


def event(number: int) -> RequestEvent:
    return RequestEvent(
        request_id=f"r{number}",
        arrival_unix_ns=START_NS + number * 1_000_000_000,
        prompt_tokens=100 + number,
        output_tokens=7,
        outcome=OUTCOME_OK,
    )


async def with_events(broker: MemoryBroker, events: Sequence[RequestEvent]) -> MemoryBus:
    bus = MemoryBus(broker, "local")
    await bus.start()
    for each in events:
        bus.publish(REQUESTS, each)
    await bus.close()
    return MemoryBus(broker, "local")


def quiet(line: str) -> None:
    """Print nothing."""


async def test_all_stored_records_are_read_without_waiting_for_more() -> None:
    bus = await with_events(MemoryBroker(), [event(number) for number in range(40)])
    found = Recording()
    await collect(bus, found, 0.0, quiet)
    assert {each.request_id for each in found.events} == {f"r{number}" for number in range(40)}


async def test_a_live_recording_contains_events_from_its_start_on_and_survives_an_interruption() -> None:
    broker = MemoryBroker()
    bus = await with_events(broker, [event(1)])
    found = Recording()
    reading = asyncio.create_task(collect(bus, found, 600.0, quiet))
    publisher = MemoryBus(broker, "local")
    await publisher.start()
    number = 2
    while not found.events:  # the subscription begins at the end, whenever that is
        publisher.publish(REQUESTS, event(number))
        number += 1
        await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait([reading])
    await publisher.close()
    assert "r1" not in {each.request_id for each in found.events}


async def test_a_live_recording_ends_after_its_duration() -> None:
    found = Recording()
    await collect(await with_events(MemoryBroker(), [event(1)]), found, 0.02, quiet)
    assert found.events == []


async def test_an_unreachable_broker_is_reported_at_once() -> None:
    broker = MemoryBroker()
    broker.kill()
    for seconds in (0.0, 600.0):
        with pytest.raises(CONNECTION_ERRORS):
            await collect(MemoryBus(broker, "local"), Recording(), seconds, quiet)


# ---------------------------------------------------------------- the command


def reads(monkeypatch: pytest.MonkeyPatch, events: Sequence[RequestEvent], *, breaks_off: bool = False) -> None:
    """Replace a broker by these events."""

    async def read(broker: EventBroker, found: Recording, seconds: float, note: Note) -> None:
        found.events += events
        if breaks_off:
            raise KeyboardInterrupt

    monkeypatch.setattr(recording, "_read", read)


@pytest.mark.parametrize("breaks_off", [False, True])
def test_a_recorded_trace_can_be_read_by_the_lab_even_after_ctrl_c(
    breaks_off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads(monkeypatch, [event(2), event(1), event(1)], breaks_off=breaks_off)
    out = tmp_path / "mine.jsonl.gz"
    done = CliRunner().invoke(app, ["lab", "record", "--kafka", "here:9092", "--out", str(out), "--json"])
    assert done.exit_code == (130 if breaks_off else 0)
    reported = json.loads(done.stdout)
    assert reported["requests"] == 2 and reported["interrupted"] is breaks_off
    trace = read_trace(out, seed=1)
    assert trace.name == "mine"
    assert [(each.arrival_ns, each.input_tokens) for each in trace.requests] == [(0, 101), (1_000_000_000, 102)]


def test_no_file_is_left_if_no_request_was_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rejected = event(1)
    rejected.outcome = OUTCOME_REJECTED
    out = tmp_path / "mine.jsonl"
    for events, says in (([], "no request has ended"), ([rejected], "none of 1 requests was served")):
        reads(monkeypatch, events)
        done = CliRunner().invoke(app, ["lab", "record", "--kafka", "here:9092", "--out", str(out)])
        assert isinstance(done.exception, InvalidRequest) and says in done.exception.message
        assert not out.exists()


def test_an_unwritable_path_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "no such folder" / "mine.jsonl"):
        done = CliRunner().invoke(app, ["lab", "record", "--kafka", "here:9092", "--out", str(out)])
        assert isinstance(done.exception, InvalidRequest) and "--out" in done.exception.message


def test_the_broker_is_the_named_one_or_that_of_the_suite(tmp_path: Path) -> None:

    suite = Ready("http://127.0.0.1:1", (), "", "", os.getpid(), "", "127.0.0.1:2", "", "blue", "", "")
    write_ready(tmp_path / "ready.json", suite)
    assert find_broker(tmp_path / "ready.json", "", "") == EventBroker("127.0.0.1:2", "blue")
    assert find_broker(tmp_path / "ready.json", "kafka:9092", "") == EventBroker("kafka:9092", "local")
    with pytest.raises(StartupError, match="fulcrum up"):
        find_broker(tmp_path / "none.json", "", "")
