"""The cluster as a decision sees it: pools of the workers that have one model and role. Pure."""

from dataclasses import dataclass

from libs.policy.roles import Role


@dataclass(frozen=True, slots=True)
class RolePool:
    """The workers of one model in one role, over a window. Depths are sums over those that report them."""

    model: str
    role: Role | None
    """None: they have none that is known here."""
    workers: int
    gpus: int
    busy: float | None
    """Share of covered GPU time in steps; None without coverage."""
    coverage: float
    """Share of the pool's GPU time in the window that telemetry covers, 0..1."""
    running: int
    waiting: int
    waiting_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All pools, by model and role."""

    window_ms: int
    pools: tuple[RolePool, ...]
    coverage: float
    """Share of all registered GPU time in the window that telemetry covers, 0..1; 0 without workers."""
    heard: bool
    """Whether every worker has reported something of late."""

    @property
    def at_rest(self) -> bool:
        """Whether everybody says that nothing ran or waited."""
        return self.heard and not any(
            pool.busy or pool.running or pool.waiting or pool.waiting_prefill_tokens for pool in self.pools
        )
