"""The pools of a cluster at one moment, as decisions record them."""

from dataclasses import dataclass

from libs.policy.roles import Role


@dataclass(frozen=True, slots=True)
class RolePool:
    """The workers of one model in one role, over a window. Queue depths are sums over the workers that report them."""

    model: str
    role: Role | None
    """The role; None if the assigned role is unknown."""
    workers: int
    gpus: int
    busy: float | None
    """The share of covered GPU time spent in steps; None without coverage."""
    coverage: float
    """The share of the pool's GPU time in the window that telemetry covers, 0..1."""
    running: int
    waiting: int
    waiting_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The pools of all models and roles."""

    window_ms: int
    pools: tuple[RolePool, ...]
    coverage: float
    """The share of all registered GPU time in the window that telemetry covers, 0..1; 0 without workers."""
    reporting: bool
    """True if every worker has reported recently."""

    @property
    def at_rest(self) -> bool:
        """Return whether every worker has reported that nothing runs or waits."""
        return self.reporting and not any(
            pool.busy or pool.running or pool.waiting or pool.waiting_prefill_tokens for pool in self.pools
        )
