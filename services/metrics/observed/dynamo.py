"""The tasks that follow a Dynamo fleet: its discovery folder, and a subscription to each of its workers."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from libs.contracts import metric_names as names
from libs.contracts.errors import FulcrumError, InvalidRequest
from libs.contracts.foreign_text import plain
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.observe.dynamo import TOPIC, Card, Envelope, PassRecord, parse_card, parse_channel, parse_message
from libs.observe.dynamo_steps import DynamoEngine, RecordCounts
from libs.observe.fleet import MOST_SERVERS
from libs.observe.zmtp import host_and_port, subscribed
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner

log = structlog.get_logger()

LOOK_S: Final = 1.0
CUT_S: Final = 0.1
RETRY_S: Final = 1.0
HEARTBEAT_MS: Final = 1_100
"""An idle worker is heard once a second, so that windows are whole only after this time."""
MAX_FILE_BYTES: Final = 1024 * 1024
MOST_FILES: Final = 16 * MOST_SERVERS
MOST_ENGINES: Final = MOST_SERVERS


class DynamoFleet:
    """The workers whose discovery folder (DYN_FILE_KV) lies on this machine."""

    def __init__(self, folder: Path, report: Callable[[bytes], None], clock: Clock) -> None:
        self._folder = folder / "v1"
        self._report = report
        self._clock = clock
        self._cards: dict[str, Card] = {}
        self._engines: dict[tuple[str, int], DynamoEngine] = {}
        self._channels: dict[str, asyncio.Task[None]] = {}
        self.counts = RecordCounts()
        self.refused: Counter[str] = Counter()
        """Messages that were no records of a known worker, and channels that failed, by reason."""

    def start(self, tasks: TaskOwner) -> None:
        tasks.spawn("dynamo folder", self._follow(tasks))
        tasks.spawn("dynamo steps", self._cut_forever())

    def take(self, parts: list[bytes], node: str) -> None:
        """Enter a message."""
        try:
            envelope, record = parse_message(parts)
        except InvalidRequest:
            self.refused["garbage"] += 1
            return
        self._enter(envelope, record, node)

    def _enter(self, envelope: Envelope, record: PassRecord, node: str) -> None:
        key = (record.worker_id, record.dp_rank)
        engine = self._engines.get(key)
        if engine is None:
            card = self._cards.get(record.worker_id)
            if card is None or len(self._engines) >= MOST_ENGINES:
                self.refused["unknown_worker"] += 1
                return
            engine = DynamoEngine(card, record.dp_rank, node, self._clock.now_ns(), self.counts)
            self._engines[key] = engine
        self._send(engine.take(envelope, record))

    def cut(self) -> None:
        """Report all that has been heard."""
        for engine in self._engines.values():
            self._send(engine.cut())

    def _send(self, batches: list[StepBatch]) -> None:
        for batch in batches:
            with suppress(FulcrumError):  # counted where it is refused
                self._report(batch.SerializeToString())

    def collect(self) -> Iterator[Metric]:
        """Yield what came of the workers' messages."""
        found = CounterMetricFamily(
            names.OBSERVED_DYNAMO_RECORDS_TOTAL,
            "Forward-pass metrics of Dynamo's workers, by what came of them.",
            labels=["outcome"],
        )
        for outcome, count in sorted({**asdict(self.counts), **self.refused}.items()):
            found.add_metric([outcome], count)
        yield found

    async def _cut_forever(self) -> None:
        while True:
            await asyncio.sleep(CUT_S)
            self.cut()

    # ------------------------------------------------------------ discovery

    async def _follow(self, tasks: TaskOwner) -> None:
        while True:
            cards, channels = await asyncio.to_thread(self._look)
            self._know(cards)
            for endpoint in self._channels.keys() - channels:
                self._channels.pop(endpoint).cancel()
            for endpoint in channels - self._channels.keys():
                self._channels[endpoint] = tasks.spawn(f"dynamo {endpoint}", self._subscribe(endpoint))
            await asyncio.sleep(LOOK_S)

    def _know(self, cards: dict[str, Card]) -> None:
        for key in [each for each in self._engines if each[0] not in cards]:
            engine = self._engines.pop(key)
            self._send([*engine.cut(), engine.farewell(self._clock.now_ns())])
        for (worker, _), engine in self._engines.items():
            engine.card = cards[worker]
        self._cards = cards

    def _look(self) -> tuple[dict[str, Card], set[str]]:
        cards = (parse_card(text) for text in _texts(self._folder / "mdc", ""))
        channels = (parse_channel(text) for text in _texts(self._folder / "event_channels", TOPIC))
        endpoints = {each.transport.config.endpoint for each in channels if each is not None}
        return {str(each.instance_id): each for each in cards if each is not None}, endpoints

    async def _subscribe(self, endpoint: str) -> None:
        while True:
            try:
                node, _ = host_and_port(endpoint)
                async for parts in subscribed(endpoint, TOPIC.encode()):
                    self.take(parts, node)
            except (OSError, TimeoutError):
                self.refused["away"] += 1
            except InvalidRequest as error:
                self.refused["foreign"] += 1
                log.warning("a Dynamo worker is not followed", endpoint=plain(endpoint), error=plain(error.message))
            await asyncio.sleep(RETRY_S)


def _texts(folder: Path, topic: str) -> Iterator[bytes]:
    """Return the contents of the folder's files for a topic, whose names are encoded like parts of a URL."""
    wanted = topic.replace("-", "%2D")
    with suppress(OSError):
        for count, file in enumerate(folder.iterdir()):
            if count >= MOST_FILES:
                return
            if wanted in file.name:
                with suppress(OSError), file.open("rb") as opened:
                    yield opened.read(MAX_FILE_BYTES)
