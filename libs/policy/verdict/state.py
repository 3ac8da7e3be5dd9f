"""What a verdict is made from: one model's workers, the work that they have, and how hard it presses. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.policy.pressure.pools import Pressures, RoleCounts
from libs.policy.pressure.splits import WorkerProfile, Workload
from libs.policy.roles import Role
from libs.policy.verdict.limits import SLOWNESS


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker that takes work, over the last two seconds."""

    id: str
    role: Role
    budget_tokens: int
    sequences: int
    """That it decodes, or holds to decode."""
    kv_tokens: int
    """That its sequences hold."""
    prompt_tokens: int
    """Waiting there."""
    slowness: float | None
    """How long its steps take, over what the same steps take its peers; None: it ran too few."""
    kv_wait: float
    """Share of its time in which no step ran and KV was on its way that was ready at its source."""
    kv_awaited: float
    """Share of its time in which such KV was on its way, whether steps ran or not."""
    held_by_link: float
    """Sequences that awaited it, on average."""
    kv_awaited_s: float = 0.0
    """For how long the longest awaited of it had been ready, on average."""

    @property
    def takes(self) -> str:
        """Its role in a word."""
        if self.role is Role.PREFILL:
            return "prefill"
        return "mixed" if self.lends else "decode"

    @property
    def lends(self) -> bool:
        """Whether it computes prompts beside its decodes."""
        return self.role is Role.MIXED and self.budget_tokens > 0

    @property
    def speed(self) -> float:
        """Workers that it counts for: less than one where it is slow."""
        slow = self.slowness or 1.0
        return 1 / slow if slow >= SLOWNESS.fire else 1.0


def role_counts(workers: Iterable[WorkerState]) -> RoleCounts:
    """By role, each by its speed."""
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
    """A model of which enough is known."""

    model: str
    engine: WorkerProfile
    work: Workload
    standing: RoleCounts
    workers: Sequence[WorkerState]
    pressures: Pressures
    """As workers are."""
    healthy: Pressures
    """As they would be if none were slow, and no sequence were held up by a link."""
    horizon_ns: float
    """Of the prompts' pressure."""
    waiting_tokens: int
    """Prompt tokens of people's requests, at workers and gateways."""
    running: int
    """Sequences that decode, those of batch jobs left out."""
    held: int
    """That are to decode and do not yet, as many as could soon."""
    queued: int
    """Requests at gateways that wait for a place to decode, and whose prompts could not be computed soon either."""
    at_rest: bool
    """Nothing runs, waits or comes."""
    prompts_error: float = 0.0
    """Standard error of the prompts that press, as a share: few requests a second say little of their rate."""

    @property
    def prefill(self) -> int:
        """Prefill workers."""
        return round(self.standing.prefill)

    @property
    def mixed(self) -> int:
        """Decode workers, those that compute prompts too included."""
        return round(self.standing.mixed)

    @property
    def lending(self) -> int:
        """Those of them that compute prompts too."""
        return round(self.standing.lending)


@dataclass(frozen=True, slots=True)
class UnknownState:
    """A model of which too little is known."""

    model: str
    why: str
    at_rest: bool
