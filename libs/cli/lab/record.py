"""The command `fulcrum lab record`: writes the requests that a running suite serves as a trace."""

import asyncio
import json
import os
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from libs.bus.clients import CONNECTION_ERRORS, quiet_client_log
from libs.bus.port import LiveBus
from libs.cli.find import find_one_suite
from libs.cli.lab.runs import noting
from libs.contracts.errors import InvalidRequest, StartupError
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.contracts.topics import REQUESTS
from libs.lab.study import Note
from libs.lab.traces.lines import MAX_REQUESTS
from libs.lab.traces.recording import recorded_trace, write_trace
from libs.lab.traces.request import Trace

# Events between two lines of progress.
NOTE_EVERY: Final = 1000


@dataclass(frozen=True, slots=True)
class EventBroker:
    address: str
    cluster: str


@dataclass(slots=True)
class Recording:
    """The events read so far, consistent at any moment so that an interrupted recording can be kept."""

    events: list[RequestEvent] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Return whether the trace has reached its largest size."""
        return len(self.events) >= MAX_REQUESTS


def record(
    *, ready_file: Path | None, kafka: str, cluster: str, seconds: float, out: Path | None, as_json: bool
) -> None:
    """Write the served requests, including those read before Ctrl-C. Raise StartupError and InvalidRequest."""
    broker = find_broker(ready_file, kafka, cluster)
    path = out or Path(time.strftime("recorded-%Y%m%d-%H%M%S.jsonl"))
    _check_writable(path)
    recording = Recording()
    interrupted = False
    with noting() as notes:
        try:
            asyncio.run(_read(broker, recording, seconds, notes.doing))
        except KeyboardInterrupt:
            interrupted = True
    trace = _trace(recording, broker, path)
    write_trace(trace, path)
    if as_json:
        print(json.dumps(_figures(trace, path, interrupted=interrupted)))
    else:
        print(_words(trace, path))
    if interrupted:
        sys.exit(130)


def find_broker(ready_file: Path | None, kafka: str, cluster: str) -> EventBroker:
    """Return the named broker, or that of the suite on this machine. Raise StartupError."""
    if kafka:
        return EventBroker(kafka, cluster or "local")
    suite = find_one_suite(ready_file)
    if not suite.kafka:
        raise StartupError(
            "no suite runs here: start one with `fulcrum up`, or name its ready file with --ready,"
            " or a broker with --kafka HOST:PORT --cluster NAME"
        )
    return EventBroker(suite.kafka, cluster or suite.cluster)


async def collect(bus: LiveBus, recording: Recording, seconds: float, note: Note) -> None:
    """Read events for `seconds`, or with 0 all that the broker holds now.

    Raise one of CONNECTION_ERRORS if the broker does not answer at first. A live recording waits out later outages.
    """
    async with bus.back_reader() as reader:
        # Also required for a live recording, which would wait for an absent broker.
        spans = [(partition, await reader.held(REQUESTS, partition)) for partition in range(REQUESTS.partitions)]
        if not seconds:
            total = sum(span.end - span.start for _, span in spans)
            for partition, span in spans:
                async for record in reader.between(REQUESTS, partition, span.start, span.end):
                    if recording.full:
                        note(f"{MAX_REQUESTS:,} requests read, the most that a trace can hold: the rest is left out")
                        return
                    _take(recording, cast(RequestEvent, record.value), note, f" of {total:,}")
            return
    async with aclosing(cast(Any, bus.subscribe([REQUESTS]))) as records:
        try:
            async with asyncio.timeout(seconds):
                async for record in records:
                    _take(recording, cast(RequestEvent, record.value), note, "")
                    if recording.full:
                        return
        except TimeoutError:
            return


async def read_all(broker: EventBroker, recording: Recording) -> None:
    """Read all events that the broker holds now. Raise StartupError if it does not answer."""
    await _read(broker, recording, 0.0, lambda line: None)


async def _read(broker: EventBroker, recording: Recording, seconds: float, note: Note) -> None:
    from libs.bus.kafka import KafkaLiveBus  # noqa: PLC0415 (a client of Kafka, which no test needs)

    quiet_client_log()  # errors are printed below, once
    bus = KafkaLiveBus(broker.address, broker.cluster, "fulcrum lab record")
    note(f"recording for {seconds:g} s" if seconds else "reading what the broker holds")
    try:
        await collect(bus, recording, seconds, note)
    except CONNECTION_ERRORS:
        raise StartupError(
            f"no broker answers at {broker.address}, or it has no cluster {broker.cluster!r}: is the suite still there?"
        ) from None
    finally:
        await bus.close()


def _take(recording: Recording, event: RequestEvent, note: Note, of: str) -> None:
    recording.events.append(event)
    if len(recording.events) % NOTE_EVERY == 0:
        note(f"{len(recording.events):,}{of} requests read")


def _trace(recording: Recording, broker: EventBroker, path: Path) -> Trace:
    name = path.name.removesuffix(".gz").rpartition(".")[0] or path.name
    trace = recorded_trace(recording.events, name=name)
    if not trace.requests:
        events = len(recording.events)
        read = f"none of {events:,} requests was served" if events else "no request has ended"
        raise InvalidRequest(f"{read} at {broker.address}, cluster {broker.cluster!r}: nothing is written")
    return trace


def _check_writable(path: Path) -> None:
    """Raise InvalidRequest if the file cannot be written, before the recording starts."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise InvalidRequest(f"{path} cannot be written: name another file with --out")


def _figures(trace: Trace, path: Path, *, interrupted: bool) -> dict[str, Any]:
    return {
        "file": str(path),
        "requests": len(trace.requests),
        "duration_s": round(trace.duration_ns / 1e9, 6),
        "notes": list(trace.notes),
        "interrupted": interrupted,
    }


def _words(trace: Trace, path: Path) -> str:
    notes = "".join(f"\n{note}" for note in trace.notes)
    count = len(trace.requests)
    return (
        f"{count:,} request{'s' if count > 1 else ''} in {trace.duration_ns / 1e9:,.1f} s, in {path}{notes}\n"
        f"Replay it: fulcrum lab run --trace {path}"
    )
