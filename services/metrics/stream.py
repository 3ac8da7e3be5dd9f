"""The live stream: its task, its messages, the hub that hands them to readers, and the answer as server-sent events.

Messages hold the workers, the windows of each 100 ms, and changes in between. Each is encoded once for all readers.
Readers receive them at their own pace, and slow readers skip some. New windows are sent every 100 ms. Changes of
earlier windows are sent more often while readers want them. Planners get workers' loads with each whole round.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from libs.contracts.errors import QueueFull
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ModelTarget
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads
from libs.contracts.roles import ROLE_NAMES
from libs.policy.alerts.store import Alert
from libs.policy.gateway.fairness import may_take
from libs.policy.verdict.assessment import Assessment
from libs.runtime.clock import Clock
from libs.runtime.tasks import until_first
from libs.telemetry.assessments import assessment_message
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.fleet_loads import MAX_WINDOWS, LoadMessageBuilder
from libs.telemetry.history import WrittenWindow
from libs.telemetry.workers import Listing, Loads
from services.metrics.accounting.queues import PhaseQueue, phase_queues
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.cluster_events import Event
from services.metrics.state import MS_NS, MetricsState, age_ns
from services.metrics.status.evaluator import VerdictEvaluator


class StreamWorker(msgspec.Struct, frozen=True):
    """A worker in the stream; ticks refer to it by its index in `StreamWorkers.workers`."""

    id: str
    node: str
    model: str
    gpus: int
    engine: str
    group: str
    """Data-parallel group of which the worker is a rank; empty if there is none."""


class StreamWorkers(msgspec.Struct):
    """Workers seen in the last five minutes, or one minute after leaving; sent first and after each change."""

    version: int
    window_ms: int
    settled_ms: int
    """The age from which windows are seldom revised."""
    roles: tuple[str, ...]
    """The names of the numbers in ticks, counted from 1."""
    workers: list[StreamWorker]


class Window(msgspec.Struct, array_like=True):
    """One window of `workers`, given as indices in `members`; None for all of them.

    The other lists are in the same order; times are in ns of one GPU.
    """

    start_unix_ms: int
    workers: list[int] | None
    covered: list[int]
    prefill: list[int]
    decode: list[int]
    kv_wait: list[int]
    roles: list[int]
    """Role numbers, plus 128 for a window with a running step, which counts as far as it is known to have run."""


class Depths(msgspec.Struct):
    """Queue depths of each worker at its last report."""

    running: list[int]
    waiting: list[int]
    waiting_prefill_tokens: list[int]
    awaiting_kv: list[int]


class Tick(msgspec.Struct, omit_defaults=True):
    """Changes since the last tick, revised windows first."""

    number: int
    version: int
    now_unix_ms: int
    windows: list[Window]
    depths: Depths | None
    """The depths as of the tick; None between two windows, where a tick holds only changes."""
    queues: list[PhaseQueue] | None
    """Queues at workers and gateways; None where depths are None."""
    events: list[Event]
    age_ms: int | None
    """The age of the data at `now_unix_ms` (see `age_ns` in state.py); None without workers or where depths are None.
    """
    alerts: list[Alert]
    """Alerts that have begun or ended since the last tick."""
    encode: list[list[int] | None] | None = None
    """For each of `windows` the part of `prefill` in steps that encoded images, None where there is none; absent if
    there is none in any.
    """


class TickWriter:
    """The encoder of numbered messages, which repeats the members when they change."""

    def __init__(self, *, window_ns: int, settled_ns: int) -> None:
        self._window_ms = window_ns // MS_NS
        self._settled_ms = settled_ns // MS_NS
        self._listing: Listing | None = None
        self._members: list[StreamWorker] = []
        """The members as last sent."""
        self._index_of: dict[str, int] = {}
        self.version = 0
        self.number = 0

    def members(self, listing: Listing) -> bytes | None:
        """Encode the members if they have changed, and always the first time."""
        if listing is self._listing:
            return None
        members = [
            StreamWorker(each.worker_id, each.node, each.model, each.gpus, each.engine, each.group)
            for each in listing.workers
        ]
        same, self._listing, self._members = members == self._members, listing, members
        if self.version and same:
            return None
        self.version += 1
        self._index_of = {member.id: index for index, member in enumerate(members)}
        message = StreamWorkers(self.version, self._window_ms, self._settled_ms, ROLE_NAMES, members)
        return b"event: members\ndata: " + msgspec.json.encode(message) + b"\n\n"

    def tick(
        self,
        now_ns: int,
        written: Sequence[WrittenWindow],
        loads: Loads,
        events: list[Event],
        alerts: list[Alert],
        *,
        queues: list[PhaseQueue],
        age_ms: int | None = None,
    ) -> bytes:
        """Encode a whole tick; `loads` belong to the workers of the last `members`."""
        columns = (loads.running, loads.waiting, loads.waiting_prefill_tokens, loads.awaiting_kv)
        depths = Depths(*(each.tolist() for each in columns))
        return self._message(now_ns, written, events, alerts, depths=depths, queues=queues, age_ms=age_ms)

    def knows(self, written: Sequence[WrittenWindow]) -> bool:
        """Report whether the last `members` contained every worker of these windows."""
        return all(self._index_of.keys() >= set(window.workers.worker_ids) for window in written)

    def changes(self, now_ns: int, written: Sequence[WrittenWindow], alerts: list[Alert]) -> bytes:
        """Encode a tick with only what was written between two windows."""
        return self._message(now_ns, written, [], alerts)

    def _message(
        self,
        now_ns: int,
        written: Sequence[WrittenWindow],
        events: list[Event],
        alerts: list[Alert],
        *,
        depths: Depths | None = None,
        queues: list[PhaseQueue] | None = None,
        age_ms: int | None = None,
    ) -> bytes:
        self.number += 1
        windows = [self._window(window) for window in written]
        message = Tick(self.number, self.version, now_ns // MS_NS, windows, depths, queues, events, age_ms, alerts)
        if any(window.workers.encode_ns is not None for window in written):
            message.encode = [self._encode(window) for window in written]
        return b"id: %d\nevent: tick\ndata: %b\n\n" % (self.number, msgspec.json.encode(message))

    def _window(self, window: WrittenWindow) -> Window:
        workers = window.workers.among(self._index_of)
        indices = [self._index_of[worker_id] for worker_id in workers.worker_ids]
        covered, prefill, decode, kv_wait = workers.times_ns.T.tolist()
        everybody = len(indices) == len(self._index_of) and indices == list(range(len(indices)))
        start_ms, roles = window.start_ns // MS_NS, workers.roles.tolist()
        return Window(start_ms, None if everybody else indices, covered, prefill, decode, kv_wait, roles)

    def _encode(self, window: WrittenWindow) -> list[int] | None:
        encode_ns = window.workers.among(self._index_of).encode_ns
        return None if encode_ns is None else encode_ns.tolist()


MAX_READERS: Final = 64
KEPT_TICKS: Final = 32
"""Ticks that are kept; a reader that is further behind continues with the newest."""
RETRY_AFTER_S: Final = 10.0


class Hub:
    """The messages of one writer, shared by all readers."""

    def __init__(self) -> None:
        self._ticks: deque[bytes] = deque(maxlen=KEPT_TICKS)
        self._written = 0
        self._members = b""
        self._members_from = 0
        """The number of the tick with which the present members were sent."""
        self._news = asyncio.Event()
        self._closed = False
        self._readers: Counter[str] = Counter()
        self.close_readers = 0
        """The number of readers that want changes between two windows."""
        self.skipped_ticks = 0
        """Ticks that readers did not get because they were slow."""

    def publish(self, tick: bytes, members: bytes | None = None) -> None:
        """Hand a tick to every reader, preceded by `members` if those have changed."""
        if members is not None:
            self._members, self._members_from = members, self._written
        self._ticks.append(tick)
        self._written += 1
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    @property
    def readers(self) -> int:
        return self._readers.total()

    def check_room(self, caller: str = "") -> None:
        """Raise QueueFull if no more readers are admitted, or no more of this caller.

        `caller` is a key's id, or empty where no key is needed.
        """
        if self.readers >= MAX_READERS:
            raise QueueFull(f"{MAX_READERS} readers hold the stream already", retry_after_s=RETRY_AFTER_S)
        own = self._readers[caller]
        if caller and not may_take(MAX_READERS, self.readers, own):
            text = f"{own} of {MAX_READERS} readers of the stream already use this key: close one first"
            raise QueueFull(text, retry_after_s=RETRY_AFTER_S)

    @contextmanager
    def reader(self, caller: str = "", *, between: bool = True) -> Iterator[AsyncIterator[bytes]]:
        """Yield messages from the newest on until `close`, occupying a reader's place while the context is open.

        `caller` is passed to `check_room`. With `between`, changes between two windows are sent at once. Without such a
        reader, they are sent with the next window.
        """
        self.check_room(caller)
        self._readers[caller] += 1
        self.close_readers += between
        try:
            yield self._read()
        finally:
            self._readers[caller] -= 1
            if not self._readers[caller]:
                del self._readers[caller]
            self.close_readers -= between

    async def _read(self) -> AsyncIterator[bytes]:
        sent_members, following = -1, max(self._written - 1, 0)
        while not self._closed:
            if following == self._written:
                await self._news.wait()
                continue
            if following < self._written - len(self._ticks):
                self.skipped_ticks += self._written - 1 - following
                following = self._written - 1
            if sent_members != self._members_from <= following:
                sent_members = self._members_from
                yield self._members
                continue  # many ticks may have been written during this send
            tick = self._ticks[following - self._written]
            following += 1
            yield tick

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


WRITE_STALL_S: Final = 30.0
"""The time for which a reader may leave its socket unread before the stream ends. A browser reconnects by itself."""


class EventStream(Response):
    """A hub's messages as server-sent events, until the client leaves or the hub closes."""

    media_type = "text/event-stream"

    def __init__(self, hub: Hub, caller: str = "", *, between: bool = True) -> None:
        """Create an answer; `caller` and `between` are passed on to `Hub.reader`."""
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._hub = hub
        self._caller = caller
        self._between = between

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, occupying a place at the hub in the meantime."""
        with self._hub.reader(self._caller, between=self._between) as messages:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_first(gone=_gone(receive), writing=_write(messages, send))
        await send({"type": "http.response.body", "body": b""})


async def _write(messages: AsyncIterator[bytes], send: Send) -> None:
    async for message in messages:
        try:
            async with asyncio.timeout(WRITE_STALL_S):
                await send({"type": "http.response.body", "body": message, "more_body": True})
        except TimeoutError:
            return


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_UNSENT: Final = 32
"""The maximum number of records that may wait for the broker before sending stops, since the loads would be outdated on
arrival.
"""


class LoadPublisher:
    """The publisher of loads; windows written between two messages are sent with the next one."""

    def __init__(
        self,
        builder: LoadMessageBuilder,
        publish: Callable[[FleetLoads], None],
        unsent: Callable[[], int] = lambda: 0,
        targets_ns: Callable[[], Mapping[str, tuple[int, int]]] = dict,
        assessments: Callable[[int], Iterable[Assessment]] = lambda now_ns: (),
    ) -> None:
        """Create a publisher; `unsent` counts records that wait for the broker.

        `targets_ns` returns the (TPOT, TTFT) targets of requests by model. `assessments` returns the assessments at a
        moment.
        """
        self._builder = builder
        self._publish = publish
        self._unsent = unsent
        self._targets_ns = targets_ns
        self._assessments = assessments
        self._written: list[WrittenWindow] = []
        self.works = False
        """True if the last message contained running, waiting or finished work, so that planners want the next one
        soon.
        """

    def keep(self, written: Sequence[WrittenWindow]) -> None:
        """Add written windows of own workers to the next message."""
        self._written = [*self._written, *written][-2 * MAX_WINDOWS :]

    def publish(self, fleet: FleetTelemetry, now_ns: int) -> None:
        """Publish all loads, and the windows written since the last call."""
        written, self._written = self._written, []
        if self._unsent() > MAX_UNSENT:
            return
        reported = self._builder.message(fleet, written, now_ns)
        self.works = reported is not None and reported.works
        if reported is not None:
            reported.message.targets.extend(
                ModelTarget(model=model, tpot_ns=tpot_ns, ttft_ns=ttft_ns)
                for model, (tpot_ns, ttft_ns) in self._targets_ns().items()
            )
            reported.message.assessments.extend(map(assessment_message, self._assessments(now_ns)))
            self._publish(reported.message)


TICK_NS: Final = 100_000_000
"""The length of the window that a tick sends for the first time, for every worker."""
UNREAD_NS: Final = 400_000_000
"""The interval at which windows are written without live readers. Four at a time cost little more than one, and less
late telemetry has to be entered again.
"""
ROUND_NS: Final = 25_000_000
"""The interval at which changes are sent, for the workers that changed. Telemetry arrives at any moment between two
ticks and mostly extends a window that was sent. It then waits for a round, not for the next tick.
"""
TIMER_NS: Final = 1_000_000
"""Accuracy of the event loop's timers; a timer that fired early would be waited for twice."""
REPLAY_NS: Final = 5_000_000_000
"""The longest time that a service with restored history waits for the broker's backlog."""
YOUNG_NS: Final = 1_000_000_000


async def tick_forever(
    state: MetricsState,
    hub: Hub,
    writer: TickWriter,
    desk: AlertEvaluator,
    clock: Clock,
    *,
    lag_ns: int,
    loads: LoadPublisher | None = None,
    verdicts: VerdictEvaluator | None = None,
) -> None:
    """Write each window `lag_ns` after its end, and revise earlier windows.

    Revisions are written every `ROUND_NS` while a reader wants them. Otherwise they come with the next window, or with
    four windows while the stream has no readers and nothing runs. A late round writes what it has missed.

    With restored history, the first round waits until the telemetry read is nearly as recent as this call. Windows
    written earlier would have to be written again.
    """
    started_ns = clock.now_ns()
    replayed = state.history.written_to_ns is None
    alerts: list[Alert] = []
    shown_number = -1
    while True:
        # There are readers: pages, other instances, or planners with something to decide.
        read = hub.readers or state.sharing is not None or (loads is not None and loads.works)
        round_ns = ROUND_NS if hub.close_readers else TICK_NS if read else UNREAD_NS
        await asyncio.sleep((round_ns - (clock.now_ns() - lag_ns) % round_ns + TIMER_NS) / 1e9)
        now_ns = clock.now_ns()
        covered_to_ns = state.fleet.directory.newest_cover_ns
        replayed = replayed or covered_to_ns >= started_ns - YOUNG_NS or now_ns > started_ns + REPLAY_NS
        if replayed:
            number = (now_ns - lag_ns) // TICK_NS
            tick(state, hub, writer, alerts, now_ns, lag_ns=lag_ns, whole=number != shown_number, loads=loads)
            shown_number = number
            await asyncio.sleep(0)  # readers get the tick first, because evaluating alerts takes as long
            alerts = await desk.look(now_ns)
            if verdicts is not None:
                await verdicts.look(now_ns)


def tick(
    state: MetricsState,
    hub: Hub,
    writer: TickWriter,
    alerts: list[Alert],
    now_ns: int,
    *,
    lag_ns: int,
    whole: bool = True,
    loads: LoadPublisher | None = None,
) -> None:
    """Run one round; `alerts` have changed since the last one.

    Without `whole`, it sends changes only, and only if readers know all workers concerned.
    """
    written = state.history.advance(now_ns - lag_ns)
    if loads is not None:
        loads.keep(written)
        if whole:
            loads.publish(state.fleet, now_ns)
    if state.sharing is not None:
        state.sharing.keep(written)
        if whole:
            state.sharing.send(state.fleet, state.rollups, now_ns)
        written = state.sharing.take_received(state.fleet, state.rollups, now_ns) + written
    if not whole and writer.knows(written):
        if alerts or any(window.workers for window in written):
            hub.publish(writer.changes(now_ns, written, alerts))
        return
    loads_now = state.fleet.directory.loads(now_ns)
    members = writer.members(loads_now.listing)
    queues = phase_queues(loads_now, state.fleet.clocks, state.gateways, now_ns)
    aged_ns = age_ns(loads_now, state.history.written_to_ns, now_ns)
    age_ms = None if aged_ns is None else aged_ns // MS_NS
    state.look_at_workers(now_ns)
    events = state.unsent_events()
    hub.publish(writer.tick(now_ns, written, loads_now, events, alerts, queues=queues, age_ms=age_ms), members)
