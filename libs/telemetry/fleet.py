"""The timelines of all workers, bounded in number."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.perfmodel.utilisation import Effort
from libs.telemetry.clocks import Clocks
from libs.telemetry.hardware import Hardware
from libs.telemetry.timeline import MAX_STEPS, PhaseTime, PrefillShare, Taken, Timeline, WorkerFacts

MAX_WORKERS: Final = 4096
"""The longest silent one goes."""
MAX_FLEET_STEPS: Final = 10_000_000
"""Of all workers, 560 MB: each may keep its part, at most `timeline.MAX_STEPS` and at least `MIN_STEPS`. 1,000 workers
with 60 steps a second are remembered for 160 s step by step; roll-ups reach further back."""
MIN_STEPS: Final = 2_048
MAX_AHEAD_NS: Final = 60 * 1_000_000_000
"""A batch that claims to cover time further ahead than clocks can differ is malformed."""
LISTED_NS: Final = 60 * 1_000_000_000
"""A worker that has been silent this long is no longer listed."""


class Fleet:
    """What is known of every worker from its telemetry."""

    def __init__(self, prefill_share: PrefillShare) -> None:
        self._prefill_share = prefill_share
        self._timelines: dict[str, Timeline] = {}
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

    def phases(self, worker_id: str, low_ns: int, high_ns: int) -> PhaseTime:
        """How a worker spent [low, high); nothing is covered for one that is not known."""
        timeline = self._timelines.get(worker_id)
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
        timeline = self._timelines.get(worker_id)
        return timeline.facts if timeline else None

    def last_step_end_ns(self, worker_id: str) -> int:
        """When a worker's last finished step ended; its start where there is none, 0 for a stranger."""
        timeline = self._timelines.get(worker_id)
        return timeline.last_step_end_ns if timeline else 0

    def lost_batches(self, worker_id: str) -> int:
        """Batches of a worker that never came, so far."""
        timeline = self._timelines.get(worker_id)
        return timeline.lost_batches if timeline else 0

    def listed(self, now_ns: int) -> Iterator[WorkerFacts]:
        """Workers heard of in the last `LISTED_NS`, by id."""
        for _, timeline in sorted(self._timelines.items()):
            if timeline.facts and timeline.facts.covered_to_unix_ns > now_ns - LISTED_NS:
                yield timeline.facts

    def _add(self, batch: StepBatch) -> Taken:
        timeline = self._timelines.get(batch.worker_id)
        if timeline is not None:
            timeline.max_steps = self._max_steps
            return timeline.add(batch)
        timeline = Timeline(self._prefill_share)
        taken = timeline.add(batch)
        if taken is Taken.COUNTED:
            if len(self._timelines) >= MAX_WORKERS:
                del self._timelines[min(self._timelines, key=self._heard_ns)]
            self._timelines[batch.worker_id] = timeline
            self._max_steps = min(MAX_STEPS, max(MIN_STEPS, MAX_FLEET_STEPS // len(self._timelines)))
        return taken

    def _heard_ns(self, worker_id: str) -> int:
        facts = self.facts(worker_id)
        return facts.covered_to_unix_ns if facts else 0
