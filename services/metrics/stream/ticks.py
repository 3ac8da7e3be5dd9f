"""Messages of the stream: the workers, the windows of each 100 ms, and changes in between. Pure.

Each is encoded once for all readers.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from libs.contracts.roles import ROLE_NAMES
from libs.policy.alerts.store import Alert
from libs.telemetry.history import WrittenWindow
from libs.telemetry.listing import Listing, Loads
from services.metrics.accounting.queues import PhaseQueue
from services.metrics.cluster_events.events import Event

MS_NS: Final = 1_000_000


class StreamWorker(msgspec.Struct, frozen=True):
    """A worker in the stream; ticks refer to it by its place in `StreamWorkers.workers`."""

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
    """Windows that ended so long before a tick are seldom revised."""
    roles: tuple[str, ...]
    """Names of the numbers in ticks, counted from 1."""
    workers: list[StreamWorker]


class Window(msgspec.Struct, array_like=True):
    """One window of `workers`, given as places in `members`; None for all of them.

    The other lists are in the same order; times are in ns of one GPU.
    """

    start_unix_ms: int
    workers: list[int] | None
    covered: list[int]
    prefill: list[int]
    decode: list[int]
    kv_wait: list[int]
    roles: list[int]
    """Role numbers, plus 128 where a step that still runs is counted as far as it is known to have run."""


class Depths(msgspec.Struct):
    """Queue depths of each worker at its last report."""

    running: list[int]
    waiting: list[int]
    waiting_prefill_tokens: list[int]
    awaiting_kv: list[int]


class Tick(msgspec.Struct):
    """Changes since the last tick, revised windows first."""

    number: int
    version: int
    now_unix_ms: int
    windows: list[Window]
    depths: Depths | None
    """None between two windows, where a tick holds only changes."""
    queues: list[PhaseQueue] | None
    """Queues at workers and gateways; None where depths are None."""
    events: list[Event]
    age_ms: int | None
    """Age of the data at `now_unix_ms` (see `age_ns` in state.py); None without workers or where depths are None."""
    alerts: list[Alert]
    """Alerts that have begun or ended since the last tick."""


class TickWriter:
    """The encoder of numbered messages, which repeats the members when they change."""

    def __init__(self, *, window_ns: int, settled_ns: int) -> None:
        self._window_ms = window_ns // MS_NS
        self._settled_ms = settled_ns // MS_NS
        self._listing: Listing | None = None
        self._members: list[StreamWorker] = []
        """The members as they were last sent."""
        self._places: dict[str, int] = {}
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
        self._places = {member.id: place for place, member in enumerate(members)}
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
        return all(self._places.keys() >= set(window.workers.worker_ids) for window in written)

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
        return b"id: %d\nevent: tick\ndata: %b\n\n" % (self.number, msgspec.json.encode(message))

    def _window(self, window: WrittenWindow) -> Window:
        workers = window.workers.among(self._places)
        places = [self._places[worker_id] for worker_id in workers.worker_ids]
        covered, prefill, decode, kv_wait = workers.times_ns.T.tolist()
        everybody = len(places) == len(self._places) and places == list(range(len(places)))
        start_ms, roles = window.start_ns // MS_NS, workers.roles.tolist()
        return Window(start_ms, None if everybody else places, covered, prefill, decode, kv_wait, roles)
