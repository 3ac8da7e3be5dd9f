"""The inputs of a verdict: one model's workers, their work, and the pressure of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.policy.pressure.pools import Pressures, RoleCounts
from libs.policy.pressure.splits import WorkerProfile, Workload
from libs.policy.roles import Role
from libs.policy.verdict.limits import SLOWNESS


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker that accepts work, over the last two seconds."""

    id: str
    role: Role
    budget_tokens: int
    sequences: int
    """Sequences that it decodes or holds to decode."""
    kv_tokens: int
    """KV tokens that its sequences hold."""
    prompt_tokens: int
    """Prompt tokens that wait at the worker."""
    slowness: float | None
    """The ratio of its step times to those of its peers for equal steps; None if it ran too few."""
    kv_wait: float
    """Share of its time in which no step ran while ready KV was in transit to it."""
    kv_awaited: float
    """Share of its time in which ready KV was in transit to it, whether or not steps ran."""
    held_by_link: float
    """The mean number of sequences that waited for such KV."""
    kv_awaited_s: float = 0.0
    """The mean time for which the longest-awaited KV had been ready."""

    @property
    def takes(self) -> str:
        if self.role is Role.PREFILL:
            return "prefill"
        return "mixed" if self.lends else "decode"

    @property
    def lends(self) -> bool:
        return self.role is Role.MIXED and self.budget_tokens > 0

    @property
    def speed(self) -> float:
        """The number of workers that it counts for; less than one if it is slow."""
        slow = self.slowness or 1.0
        return 1 / slow if slow >= SLOWNESS.fire else 1.0


def role_counts(workers: Iterable[WorkerState]) -> RoleCounts:
    """Sum the speeds of workers by role."""
    prefill = mixed = lending = 0.0
    for each in workers:
        if each.role is Role.PREFILL:
            prefill += each.speed
        else:
            mixed += each.speed
            lending += each.speed * each.lends
    return RoleCounts(prefill, mixed, lending)


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model about which enough is known for a verdict."""

    model: str
    engine: WorkerProfile
    work: Workload
    standing: RoleCounts
    workers: Sequence[WorkerState]
    pressures: Pressures
    """The pressures on the workers as they are."""
    healthy: Pressures
    """The pressures if no worker were slow and no link held up a sequence."""
    horizon_ns: float
    """The horizon at which prompts press most."""
    waiting_tokens: int
    """Prompt tokens of people's requests, at workers and gateways."""
    running: int
    """Sequences that decode, without those of batch jobs."""
    held: int
    """Sequences that do not decode yet but could soon."""
    queued: int
    """Requests at gateways that wait for a decode place and whose prompts could not be computed soon either."""
    at_rest: bool
    """Whether nothing runs, waits or arrives."""
    ttft_ns: int
    """The target by which prompts are judged, which `work.tpot_ns` is for decodes."""
    prompts_error: float = 0.0
    """Relative standard error of the prompts' pressure; few requests a second say little about their rate."""

    @property
    def prefill(self) -> int:
        return round(self.standing.prefill)

    @property
    def backlog_s(self) -> float:
        """The time that the prefill workers need for all prompts that wait."""
        return self.work.waiting_ns / 1e9 / max(self.standing.prefill, 1)

    @property
    def mixed(self) -> int:
        return round(self.standing.mixed)

    @property
    def lending(self) -> int:
        """The number of decode workers that also compute prompts."""
        return round(self.standing.lending)


@dataclass(frozen=True, slots=True)
class UnknownState:
    """A model about which too little is known for a verdict."""

    model: str
    why: str
    at_rest: bool
