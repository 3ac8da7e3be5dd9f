"""The tasks that follow a Dynamo fleet: its discovery folder, and the records that its workers publish."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from libs.contracts import metric_names as names
from libs.contracts.errors import FulcrumError, InvalidRequest
from libs.contracts.foreign_text import plain
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.observe.demand import KnownWork
from libs.observe.dynamo import TOPIC, Card, PassRecord, PublishedRecord, parse_message
from libs.observe.dynamo_folder import DynamoMembers, read_members
from libs.observe.dynamo_steps import DynamoEngine, RecordCounts
from libs.observe.fleet import MOST_SERVERS
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from services.metrics.observed.server import ServerState
from services.metrics.status.observed import ObservedServerStatus

if TYPE_CHECKING:
    from libs.observe.subscriber import Subscriber

LOOK_S: Final = 1.0
CUT_S: Final = 0.1
HEARTBEAT_MS: Final = 1_100
"""The most time between two records of an idle worker, so that windows are whole only after it."""
AWAY_NS: Final = 4_000_000_000
"""The time without a record after which a worker is away."""
MOST_ENGINES: Final = MOST_SERVERS


@dataclass(slots=True)
class _Worker:
    """A worker that the folder names."""

    card: Card
    began_ns: int
    received_ns: int = 0
    state: ServerState = ServerState.UNKNOWN
    since_ns: int = 0
    restarts: int = 0
    endpoint: str = ""

    def enter(self, state: ServerState, now_ns: int) -> None:
        if state is not self.state:
            self.state, self.since_ns = state, now_ns


class DynamoFleet:
    """The workers whose discovery folder (DYN_FILE_KV) lies on this machine."""

    def __init__(
        self,
        folder: Path,
        report: Callable[[bytes], None],
        clock: Clock,
        enter: Callable[[str, str, str, KnownWork], None] = lambda *_: None,
    ) -> None:
        """Create the fleet. `report` receives steps; `enter` receives a worker, its model, its role and its demand."""
        self._folder = folder
        self._report = report
        self._enter_demand = enter
        self._clock = clock
        self._members = DynamoMembers({}, {})
        self._workers: dict[str, _Worker] = {}
        self._engines: dict[tuple[str, int], DynamoEngine] = {}
        self.counts = RecordCounts()
        self.refused: Counter[str] = Counter()
        """The messages that were not records of a known worker, by reason."""
        self._channel_received_ns: dict[int, int] = {}
        self._subscriber: Subscriber | None = None

    def start(self, tasks: TaskOwner) -> None:
        from libs.observe.subscriber import Subscriber  # noqa: PLC0415 (ZeroMQ, which only Dynamo's fleets need)

        self._subscriber = Subscriber(TOPIC.encode())
        tasks.spawn("dynamo folder", self._follow(self._subscriber))
        tasks.spawn("dynamo connections", self._subscriber.watch())
        tasks.spawn("dynamo records", self._receive(self._subscriber))
        tasks.spawn("dynamo steps", self._cut_forever())

    def take(self, parts: list[bytes]) -> None:
        """Enter a message. A message that is not a record of a known worker is counted and dropped."""
        try:
            envelope, record = parse_message(parts)
        except InvalidRequest:
            self.refused["garbage"] += 1
            return
        self._enter(envelope, record)

    def _enter(self, envelope: PublishedRecord, record: PassRecord) -> None:
        worker, channel = self._workers.get(record.worker_id), self._members.channels.get(envelope.publisher_id)
        if worker is None or channel is None:
            self.refused["unknown_worker"] += 1
            return
        now_ns = self._channel_received_ns[envelope.publisher_id] = self._clock.now_ns()
        engine = self._engines.get((record.worker_id, record.dp_rank))
        if engine is None:
            if len(self._engines) >= MOST_ENGINES:
                self.refused["unknown_worker"] += 1
                return
            engine = DynamoEngine(worker.card, record.dp_rank, channel.node, now_ns, self.counts)
            self._engines[record.worker_id, record.dp_rank] = engine
        restarts = self.counts.restarts
        self._send(engine.take(envelope, record))
        self._pass_demand(engine)
        worker.restarts += self.counts.restarts - restarts
        worker.received_ns, worker.endpoint = now_ns, channel.endpoint
        worker.enter(ServerState.EXACT, now_ns)

    def cut(self) -> None:
        """Report all steps that have been received."""
        for engine in self._engines.values():
            self._send(engine.cut())
            self._pass_demand(engine)

    def models(self) -> dict[str, str]:
        """Return the engines that have published records, with their models."""
        return {each.name: each.card.card_json.display_name for each in self._engines.values()}

    def _pass_demand(self, engine: DynamoEngine) -> None:
        stretches, engine.stretches = engine.stretches, []
        for each in stretches:
            self._enter_demand(engine.name, engine.card.card_json.display_name, engine.card.role, each)

    def _send(self, batches: list[StepBatch]) -> None:
        for batch in batches:
            with suppress(FulcrumError):  # the refusal has counted it
                self._report(batch.SerializeToString())

    def status(self) -> list[ObservedServerStatus]:
        """Return the workers in the folder by name."""
        found = [
            ObservedServerStatus(
                each.card.name, plain(each.endpoint), each.card.role, plain(each.card.card_json.display_name),
                each.state, "it publishes no records" if each.state is ServerState.AWAY else "",
                each.since_ns // 1_000_000, each.restarts,
            )
            for each in self._workers.values()
        ]  # fmt: skip
        return sorted(found, key=lambda each: each.name)

    def collect(self) -> Iterator[Metric]:
        """Yield the messages of the workers by outcome."""
        found = CounterMetricFamily(
            names.OBSERVED_DYNAMO_RECORDS_TOTAL,
            "Forward-pass metrics of Dynamo's workers, by outcome.",
            labels=["outcome"],
        )
        failures = Counter[str]() if self._subscriber is None else self._subscriber.failures
        for outcome, count in sorted({**asdict(self.counts), **self.refused, **failures}.items()):
            found.add_metric([outcome], count)
        yield found

    async def _cut_forever(self) -> None:
        while True:
            await asyncio.sleep(CUT_S)
            self.cut()

    async def _receive(self, subscriber: "Subscriber") -> None:
        try:
            async for parts in subscriber.messages():
                self.take(parts)
        finally:
            subscriber.close()

    # ------------------------------------------------------------ discovery

    async def _follow(self, subscriber: "Subscriber") -> None:
        while True:
            now_s = self._clock.now_ns() / 1e9
            self.know(await asyncio.to_thread(read_members, self._folder, now_s))
            subscriber.follow(each.endpoint for each in self._members.channels.values())
            for endpoint in self.quiet_endpoints():
                subscriber.renew(endpoint)
            await asyncio.sleep(LOOK_S)

    def quiet_endpoints(self) -> list[str]:
        """Return the endpoints without a record for `AWAY_NS`, each at most once in that time."""
        now_ns, channels = self._clock.now_ns(), self._members.channels
        received_ns = self._channel_received_ns = {
            each: self._channel_received_ns.get(each, now_ns) for each in channels
        }
        quiet = [each for each in channels if now_ns > received_ns[each] + AWAY_NS]
        received_ns.update(dict.fromkeys(quiet, now_ns))
        return [channels[each].endpoint for each in quiet]

    def know(self, members: DynamoMembers) -> None:
        """Set the fleet's workers and channels, and report the last batch of each worker that has left."""
        now_ns = self._clock.now_ns()
        for key in [each for each in self._engines if each[0] not in members.cards]:
            engine = self._engines.pop(key)
            self._send([*engine.cut(), engine.farewell(now_ns)])
        for worker_id in self._workers.keys() - members.cards.keys():
            del self._workers[worker_id]
        for worker_id, card in list(members.cards.items())[:MOST_SERVERS]:
            self._workers.setdefault(worker_id, _Worker(card, now_ns)).card = card
        for (worker_id, _), engine in self._engines.items():
            engine.card = members.cards[worker_id]
        for worker in self._workers.values():
            if now_ns > max(worker.received_ns, worker.began_ns) + AWAY_NS:
                worker.enter(ServerState.AWAY, now_ns)
        self._members = members
