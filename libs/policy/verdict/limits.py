"""Thresholds of verdicts, from which alerts take theirs. Pure."""

from dataclasses import dataclass
from typing import Final

from libs.policy.grade import Threshold

PRESSURE: Final = Threshold(1.0, 0.85)
"""Above 1, work grows into a queue."""
SLOWNESS: Final = Threshold(1.8, 1.4)
"""Learned step times are good to a tenth; a host whose cores are all busy adds a half."""
KV_WAIT: Final = Threshold(0.2, 0.1)
"""Share of a worker's time without a step in which such KV is on its way."""
KV_AWAITED: Final = Threshold(0.75, 0.4)
"""Of the time in which KV that is ready at its source is on its way to a worker, steps running or not."""
KV_AWAITED_S: Final = Threshold(0.5, 0.25)
"""How long it has been ready: what comes sooner holds nobody up, however often it does."""
LEAST_WAIT_S: Final = 0.1
"""Prompts press only where those that wait take prefill workers so long: what is computed as it comes is no queue."""
CLEAR_PRESSURE: Final = 1.3
"""From here on prompts press whatever waits: below it the rate of the last seconds may be chance."""
QUEUED_S: Final = 0.75
"""And below it they do where those that wait take prefill workers so long."""


@dataclass(frozen=True, slots=True)
class VerdictLimits:
    """When something is a cause, and how long that must last."""

    pressure: Threshold = PRESSURE
    slowness: Threshold = SLOWNESS
    kv_wait: Threshold = KV_WAIT
    kv_awaited: Threshold = KV_AWAITED
    kv_awaited_s: Threshold = KV_AWAITED_S
    for_ns: int = 600_000_000
    """A cause must last so long before it is named."""
    slow_for_ns: int = 200_000_000
    """A slow worker: two of its steps, 0.4 s or more together, have said so already."""
    clear_ns: int = 3_000_000_000
    """And be gone for so long before it is no more."""
