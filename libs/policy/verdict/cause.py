"""A cause of a verdict: its code, a sentence with the figures, and the action to take."""

import shlex
from dataclasses import dataclass, replace
from enum import StrEnum

from libs.policy.grade import Grade


class CauseCode(StrEnum):
    """The kind of bottleneck of a cluster, or its absence."""

    IDLE = "idle"
    BALANCED = "balanced"
    PREFILL_BOUND = "prefill_bound"
    DECODE_BOUND_TPOT = "decode_bound_tpot"
    DECODE_BOUND_KV = "decode_bound_kv"
    SLOW_LINK = "slow_link"
    SLOW_WORKER = "slow_worker"
    TOO_SMALL = "too_small"
    UNKNOWN = "unknown"


# Other roles of the same workers would end these.
IMBALANCES = frozenset((CauseCode.PREFILL_BOUND, CauseCode.DECODE_BOUND_TPOT, CauseCode.DECODE_BOUND_KV))
# A model has one of these at a time.
SHORTAGES = IMBALANCES | {CauseCode.TOO_SMALL}


@dataclass(frozen=True, slots=True)
class Action:
    """A change of role for some workers."""

    workers: tuple[str, ...]
    role: str
    budget_tokens: int
    """The prompt budget of role mixed."""
    pressure_then: float
    """The predicted pressure of the worse phase after the move."""
    # Prompts and decodes come and go while workers move, so a range is promised.
    pressure_range: tuple[float, float] = (0.0, 0.0)

    @property
    def command(self) -> str:
        """The command line that performs the action, quoted for a shell: a worker chooses its own id."""
        role = f"mixed:{self.budget_tokens}" if self.role == "mixed" else self.role
        return shlex.join(("fulcrum", "role", *self.workers, role))


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason why requests are held up."""

    code: CauseCode
    model: str
    sentence: str
    workers: tuple[str, ...] = ()
    """The slow workers, or those behind a slow link."""
    action: Action | None = None
    since_ns: int = 0
    grade: Grade = Grade.FIRE
    rank: int = 0
    """Sort key of causes; the smallest comes first."""

    def seen(self, since_ns: int) -> "Cause":
        """Return the cause with the time since which it has held."""
        return replace(self, since_ns=since_ns)
