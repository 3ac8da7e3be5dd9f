"""What a verdict is made from: one model's workers, the work that they have, and how hard it presses. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from libs.policy.pressure.pools import Pressures, RoleCounts
from libs.policy.pressure.splits import WorkerProfile, Workload
from libs.policy.roles import Role


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
    def lends(self) -> bool:
        """Whether it computes prompts beside its decodes."""
        return self.role is Role.MIXED and self.budget_tokens > 0


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
    """That are to decode and do not yet."""
    at_rest: bool
    """Nothing runs, waits or comes."""

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
        """Of them, those that compute prompts too."""
        return round(self.standing.lending)


@dataclass(frozen=True, slots=True)
class UnknownModel:
    """A model of which too little is known."""

    model: str
    why: str
    at_rest: bool
