"""What alerts are decided from: depths, shares and latencies at a moment. Pure."""

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
    """At workers and gateways: prompt tokens still to compute of prefill, sequences not yet running of decode; None
    while telemetry does not say."""

    places: int
    """Sequences that its workers run at a time; 0 where they do not report it."""
    taken: int
    """Places that are."""

    @property
    def full(self) -> bool:
        """Every place is taken: what comes further waits at the gateways."""
        return 0 < self.places <= self.taken

    @property
    def unit(self) -> str:
        """What `waiting` counts."""
        return "prompt tokens" if self.phase == "prefill" else "sequences"


class WorkerReport(NamedTuple):
    """One worker at its last report."""

    id: str
    node: str
    model: str
    silent_ns: int
    """Since its telemetry ended, beyond what is usual."""
    left: bool
    """It said that nothing comes any more."""
    at_hand: int
    """Sequences that it holds, running or not."""
    since_step_ns: int
    """From the end of its last finished step until its telemetry ended."""
    reader: str
    """The instance that reads its telemetry; empty for this one."""
    kv_used: float | None
    """Share of its KV blocks that sequences hold; None where it does not report it."""


@dataclass(frozen=True, slots=True)
class RequestCount:
    """Requests of a window, and how many of them missed their target."""

    total: int
    bad: int

    @property
    def share(self) -> float:
        """Share of bad ones; 0 without any request."""
        return self.bad / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Burn:
    """A service level of a model, over windows by their length in seconds."""

    model: str
    slo: str
    """ttft or tpot."""
    windows: dict[int, RequestCount]
    age_s: float
    """Since the first request that is counted; what was before is not known."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A moment."""

    at_ns: int
    pools: list[PhasePool]
    workers: list[WorkerReport]
    burns: list[Burn]
    silent_ns: int | None
    """Since telemetry of any worker came; None before the first."""
    causes: Sequence[Cause] = ()
    """What the verdict names."""
    judged: frozenset[str] = frozenset()
    """Models of which it knows enough. Of others, pools are judged by how busy they are."""
    links: Sequence[KvLink] = ()
    """Between workers, as fast as KV has come over them."""

    @property
    def behind_ns(self) -> int:
        """More than half of the workers that have not left have been silent at least this long: what came meanwhile
        covers earlier time. 0 without workers."""
        silent_ns = sorted(worker.silent_ns for worker in self.workers if not worker.left)
        return silent_ns[(len(silent_ns) - 1) // 2] if silent_ns else 0
