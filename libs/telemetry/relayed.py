"""A worker of which another process tells. Pure."""

from dataclasses import dataclass

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import SharedWorker
from libs.telemetry.facts import WorkerFacts, facts_of, told_compute
from libs.telemetry.listing import Listed, listed_of
from libs.telemetry.steps import FULL_SHARE, RunningStep


@dataclass(frozen=True, slots=True)
class Relayed:
    """What is known of it here."""

    facts: WorkerFacts
    last_step_end_ns: int
    lost_batches: int
    running_step: RunningStep | None
    reader: str = ""
    """The process's name."""

    def listed(self) -> Listed:
        """What of it changes seldom."""
        return listed_of(self.facts, own=False, reader=self.reader)


def relayed_of(worker: SharedWorker, reader: str) -> Relayed:
    """From the words of `reader`."""
    batch = worker.newest
    facts = facts_of(batch, told_compute(batch))
    return Relayed(facts, worker.last_step_end_unix_ns, worker.lost_batches, _running_step(worker), reader)


def _running_step(worker: SharedWorker) -> RunningStep | None:
    if not 0 < worker.running_step_unix_ns <= worker.newest.covered_to_unix_ns:
        return None
    return worker.running_step_unix_ns, min(worker.running_step_share, FULL_SHARE)
