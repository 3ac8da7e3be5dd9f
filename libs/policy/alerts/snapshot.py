"""The inputs of alert rules: depths, shares and latencies at a moment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from libs.policy.metrics.kv_links import KvLink
from libs.policy.verdict.cause import Cause


@dataclass(frozen=True, slots=True)
class PhasePool:
    """The workers of one model that serve one phase: those of role prefill, or those of roles decode and mixed."""

    model: str
    phase: str
    workers: int
    gpus: int
    covered_ns: int
    """GPU-ns of the window that telemetry covers."""
    busy_ns: int
    kv_wait_ns: int
    waiting: int | None
    """Work waiting at workers and gateways; None while telemetry does not report it.

    It counts prompt tokens still to compute for prefill, and sequences not yet running for decode.
    """

    places: int
    """Sequences that its workers can run at a time; 0 if they do not report it."""
    taken: int

    @property
    def full(self) -> bool:
        """Whether every place is taken, so that further sequences wait at the gateways."""
        return 0 < self.places <= self.taken

    @property
    def unit(self) -> str:
        """The unit in which `waiting` counts."""
        return "prompt tokens" if self.phase == "prefill" else "sequences"


class WorkerReport(NamedTuple):
    """The state of a worker at its last report."""

    id: str
    node: str
    model: str
    silent_ns: int
    """Time since its telemetry ended, beyond the usual delay."""
    left: bool
    """Whether it announced the end of its telemetry."""
    at_hand: int
    """Sequences that it holds, running or not."""
    since_step_ns: int
    """Time from the end of its last finished step to the end of its telemetry."""
    reader: str
    """The instance that reads its telemetry; empty for this one."""
    kv_used: float | None
    """Share of its KV blocks that sequences hold; None if it does not report it."""


@dataclass(frozen=True, slots=True)
class RequestCount:
    """The requests of a window, and those of them that missed their target."""

    total: int
    bad: int

    @property
    def share(self) -> float:
        """Share of bad requests; 0 if there is none."""
        return self.bad / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Burn:
    """A model's service level, with counts over windows by their length in seconds."""

    model: str
    slo: str
    windows: dict[int, RequestCount]
    age_s: float
    """Time since the first counted request; nothing is known of the time before."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the cluster at one moment."""

    at_ns: int
    pools: list[PhasePool]
    workers: list[WorkerReport]
    burns: list[Burn]
    silent_ns: int | None
    """Time since the last telemetry of any worker; None before the first."""
    causes: Sequence[Cause] = ()
    """The causes that the verdict names."""
    judged: frozenset[str] = frozenset()
    """Models that the verdict covers; pools of others are judged by how busy they are."""
    links: Sequence[KvLink] = ()
    """Links between workers, with the speed of KV transfers."""

    @property
    def behind_ns(self) -> int:
        """The least silence of more than half of the workers that have not left; 0 without workers.

        Telemetry that arrives after such a silence covers earlier time.
        """
        silent_ns = sorted(worker.silent_ns for worker in self.workers if not worker.left)
        return silent_ns[(len(silent_ns) - 1) // 2] if silent_ns else 0
