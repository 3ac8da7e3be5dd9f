"""What a verdict says: its code, the figures in a sentence, and what to do. Pure."""

import shlex
from dataclasses import dataclass, replace
from enum import StrEnum

from libs.policy.grade import Grade


class CauseCode(StrEnum):
    """What holds a cluster up, if anything does."""

    IDLE = "idle"
    BALANCED = "balanced"
    PREFILL_BOUND = "prefill_bound"
    DECODE_BOUND_TPOT = "decode_bound_tpot"
    DECODE_BOUND_KV = "decode_bound_kv"
    SLOW_LINK = "slow_link"
    SLOW_WORKER = "slow_worker"
    TOO_SMALL = "too_small"
    UNKNOWN = "unknown"


IMBALANCES = frozenset((CauseCode.PREFILL_BOUND, CauseCode.DECODE_BOUND_TPOT, CauseCode.DECODE_BOUND_KV))
"""Other roles of the same workers would end them."""
SHORTAGES = IMBALANCES | {CauseCode.TOO_SMALL}
"""Of which a model has one at a time."""


@dataclass(frozen=True, slots=True)
class Action:
    """Workers that are to take another role."""

    workers: tuple[str, ...]
    role: str
    """prefill, decode or mixed."""
    budget_tokens: int
    """Of role mixed."""
    pressure_then: float
    """That is predicted of the phase that is worse off then."""
    pressure_range: tuple[float, float] = (0.0, 0.0)
    """Within which it is promised: prompts and decodes come and go while workers move."""

    @property
    def command(self) -> str:
        """The command line, quoted for a shell: a worker chooses its own id."""
        role = f"mixed:{self.budget_tokens}" if self.role == "mixed" else self.role
        return shlex.join(("fulcrum", "role", *self.workers, role))


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that holds requests up."""

    code: CauseCode
    model: str
    sentence: str
    workers: tuple[str, ...] = ()
    """The slow ones, or those behind a slow link."""
    action: Action | None = None
    since_ns: int = 0
    grade: Grade = Grade.FIRE
    rank: int = 0
    """The least comes first."""

    def seen(self, since_ns: int) -> "Cause":
        """The same, that has stood since then."""
        return replace(self, since_ns=since_ns)
