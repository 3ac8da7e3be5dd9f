"""The thresholds of verdicts, which alerts share."""

from dataclasses import dataclass
from typing import Final

from libs.policy.grade import Threshold

# Above 1, work grows into a queue.
PRESSURE: Final = Threshold(1.0, 0.85)
# Learned step times are accurate to a tenth; a host whose cores are all busy adds a half.
SLOWNESS: Final = Threshold(1.8, 1.4)
KV_WAIT: Final = Threshold(0.2, 0.1)
"""Share of a worker's time in which no step runs while ready KV is in transit to it."""
KV_AWAITED: Final = Threshold(0.75, 0.4)
"""Share of a worker's time in which ready KV is in transit to it, whether or not steps run."""
# KV that arrives sooner after it is ready delays nobody, however often that happens.
KV_AWAITED_S: Final = Threshold(0.5, 0.25)
# Below this wait per prefill worker there is no queue: prompts are computed as they come.
LEAST_WAIT_S: Final = 0.1
# Below this pressure the rate of the last seconds may be chance, so it counts only with a queue.
CLEAR_PRESSURE: Final = 1.3
QUEUED_S: Final = 0.75
"""The wait per prefill worker that makes a pressure below CLEAR_PRESSURE count."""


@dataclass(frozen=True, slots=True)
class VerdictLimits:
    """The thresholds of causes and the times for which they must hold."""

    pressure: Threshold = PRESSURE
    slowness: Threshold = SLOWNESS
    kv_wait: Threshold = KV_WAIT
    kv_awaited: Threshold = KV_AWAITED
    kv_awaited_s: Threshold = KV_AWAITED_S
    for_ns: int = 600_000_000
    """How long a cause must last before it is named."""
    # A slow worker has shown it in two steps already, which took 0.4 s or more together.
    slow_for_ns: int = 200_000_000
    clear_ns: int = 3_000_000_000
    """How long a cause must be gone before it ends."""
