"""The timelines of all workers, bounded in number."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import SharedWorker, StepBatch
from libs.perfmodel.utilisation import Effort
from libs.telemetry.clocks import Clocks
from libs.telemetry.hardware import Hardware
from libs.telemetry.timeline import MAX_STEPS, PhaseTime, PrefillShare, Taken, Timeline, WorkerFacts, facts_of

MAX_WORKERS: Final = 4096
"""The longest silent one goes."""
MAX_FLEET_STEPS: Final = 10_000_000
"""Of all workers, 560 MB: each may keep its part, at most `timeline.MAX_STEPS` and at least `MIN_STEPS`. 1,000 workers
with 60 steps a second are remembered for 160 s step by step; roll-ups reach further back."""
MIN_STEPS: Final = 2_048
MAX_AHEAD_NS: Final = 60 * 1_000_000_000
"""A batch that claims to cover time further ahead than clocks can differ is malformed."""
BEHIND_NS: Final = 500_000_000
"""A worker of which another process knows so much more is read there, and here no more."""
LISTED_NS: Final = 60 * 1_000_000_000
"""A worker that has been silent this long is no longer listed."""


Windows = Callable[[str, int, int], PhaseTime]
"""What a worker's windows say of [low, high) in Unix ns."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """A worker whose telemetry another process reads."""

    facts: WorkerFacts
    last_step_end_ns: int
    lost_batches: int


class Fleet:
    """What is known of every worker from its telemetry."""

    def __init__(self, prefill_share: PrefillShare, windows: Windows = lambda *_: PhaseTime()) -> None:
        """`windows` knows the time of workers whose telemetry others read."""
        self._prefill_share = prefill_share
        self._windows = windows
        self._timelines: dict[str, Timeline] = {}
        self._relayed: dict[str, Relayed] = {}
        self._taken_over_ns: dict[str, int] = {}
        """Of workers that another process read before: from when on their telemetry came here."""
        self._max_steps = MAX_STEPS
        self.batches: Counter[Taken] = Counter()
        self.kv_bytes: Counter[str] = Counter()
        """Bytes handed over between workers, by way: "shared_memory" or "grpc"."""
        self.hardware = Hardware()
        self.clocks = Clocks()
        self.latest_arrival_ns: int | None = None
        """When the newest batch came, by the clock of this process."""
        self.newest_cover_ns = 0
        """The latest moment that any batch tells of."""

    def add(self, batch: StepBatch, now_ns: int) -> Taken:
        """Enter a worker's batch that came at `now_ns`."""
        self.latest_arrival_ns = now_ns
        taken = Taken.MALFORMED if batch.covered_to_unix_ns > now_ns + MAX_AHEAD_NS else self._add(batch)
        self.batches[taken] += 1
        if taken is Taken.COUNTED:
            self.newest_cover_ns = max(batch.covered_to_unix_ns, self.newest_cover_ns)
            self.hardware.add(batch)
            self.clocks.note(batch.node, batch.covered_to_unix_ns, now_ns)
            for transfer in batch.kv_transfers:
                self.kv_bytes["shared_memory" if transfer.shared_memory else "grpc"] += transfer.bytes
        return taken

    def relay(self, worker: SharedWorker) -> None:
        """Another process tells of a worker that it reads. Ignored where its telemetry comes here."""
        batch = worker.newest
        if not batch.worker_id or batch.covered_to_unix_ns > worker.arrived_unix_ns + MAX_AHEAD_NS:
            return
        own = self.facts(batch.worker_id) if self.is_own(batch.worker_id) else None
        if own is not None and own.covered_to_unix_ns > batch.covered_to_unix_ns - BEHIND_NS:
            return
        self._forget(batch.worker_id)
        if batch.worker_id not in self._relayed and len(self._relayed) >= MAX_WORKERS:
            del self._relayed[min(self._relayed, key=self._heard_ns)]
        self._relayed[batch.worker_id] = Relayed(facts_of(batch), worker.last_step_end_unix_ns, worker.lost_batches)
        self.latest_arrival_ns = max(worker.arrived_unix_ns, self.latest_arrival_ns or 0)
        self.newest_cover_ns = max(batch.covered_to_unix_ns, self.newest_cover_ns)
        self.hardware.add(batch)
        self.clocks.note(batch.node, batch.covered_to_unix_ns, worker.arrived_unix_ns)

    def is_own(self, worker_id: str) -> bool:
        """Whether its telemetry comes here."""
        return worker_id in self._timelines

    def phases(self, worker_id: str, low_ns: int, high_ns: int) -> PhaseTime:
        """How a worker spent [low, high); nothing is covered for one that is not known.

        Of one that others read, or did at `low_ns`, in whole windows: both ends are moved back to where one begins.
        """
        timeline = self._timelines.get(worker_id)
        if worker_id in self._relayed or low_ns < self._taken_over_ns.get(worker_id, 0):
            return self._windows(worker_id, low_ns, high_ns)
        return timeline.phases(low_ns, high_ns) if timeline else PhaseTime()

    def effort(self, worker_id: str, low_ns: int, high_ns: int) -> Effort:
        """What a worker's finished steps computed and moved in [low, high), as far as it tells."""
        timeline = self._timelines.get(worker_id)
        return timeline.effort(low_ns, high_ns) if timeline else Effort()

    def role_at(self, worker_id: str, at_ns: int) -> str:
        """The role that a worker had at a moment, in words; empty when nothing is known of it."""
        timeline = self._timelines.get(worker_id)
        return timeline.role_at(at_ns) if timeline else ""

    def facts(self, worker_id: str) -> WorkerFacts | None:
        """What a worker last said of itself."""
        relayed, timeline = self._relayed.get(worker_id), self._timelines.get(worker_id)
        return timeline.facts if timeline else relayed.facts if relayed else None

    def last_step_end_ns(self, worker_id: str) -> int:
        """When a worker's last finished step ended; its start where there is none, 0 for a stranger."""
        known = self._timelines.get(worker_id) or self._relayed.get(worker_id)
        return known.last_step_end_ns if known else 0

    def lost_batches(self, worker_id: str) -> int:
        """Batches of a worker that never came, so far."""
        known = self._timelines.get(worker_id) or self._relayed.get(worker_id)
        return known.lost_batches if known else 0

    def listed(self, now_ns: int) -> Iterator[WorkerFacts]:
        """Workers heard of in the last `LISTED_NS`, by id."""
        known: dict[str, Relayed | Timeline] = {**self._relayed, **self._timelines}
        for _, each in sorted(known.items()):
            if each.facts and each.facts.covered_to_unix_ns > now_ns - LISTED_NS:
                yield each.facts

    def _add(self, batch: StepBatch) -> Taken:
        timeline = self._timelines.get(batch.worker_id)
        if timeline is not None:
            timeline.max_steps = self._max_steps
            return timeline.add(batch)
        timeline = Timeline(self._prefill_share)
        taken = timeline.add(batch)
        if taken is Taken.COUNTED:
            if len(self._timelines) >= MAX_WORKERS:
                self._forget(min(self._timelines, key=self._heard_ns))
            self._timelines[batch.worker_id] = timeline
            if self._relayed.pop(batch.worker_id, None):
                self._taken_over_ns[batch.worker_id] = batch.covered_from_unix_ns
            self._max_steps = min(MAX_STEPS, max(MIN_STEPS, MAX_FLEET_STEPS // len(self._timelines)))
        return taken

    def _forget(self, worker_id: str) -> None:
        self._timelines.pop(worker_id, None)
        self._taken_over_ns.pop(worker_id, None)

    def _heard_ns(self, worker_id: str) -> int:
        facts = self.facts(worker_id)
        return facts.covered_to_unix_ns if facts else 0
