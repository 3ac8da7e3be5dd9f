"""The time within which waiting prompts are due, and the number of workers required for it."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import exp
from typing import Final

from libs.policy.pressure import Workload

LEAST_DUE_NS: Final = 1_000_000_000
"""The time within which waiting prompts are due if targets are short or unknown."""
MOST_DUE_NS: Final = 5_000_000_000
"""The longest time within which waiting prompts are due."""
DUE_SHARE: Final = 0.5
"""The share of the TTFT target within which waiting prompts are due.

The rest is left for running steps, reports and moves.
"""
AHEAD_NS: Final = 10_000_000_000
"""The time for which prompts are expected to keep arriving at the present rate, beyond the time that they may wait."""


STRICT_PERCENT: Final = 10
"""The percentile of requests' TTFT targets by which prompts are judged.

Of several classes, it is the strictest target of a tenth of the requests, since only the sum of what waits is known.
"""
LEAST_TARGETS: Final = 100 // STRICT_PERCENT


def strict_target_ns(ttft_ns: Collection[int]) -> int:
    """Return the TTFT target to judge by, given those of recent requests; 0 if there are too few."""
    return sorted(ttft_ns)[len(ttft_ns) * STRICT_PERCENT // 100] if len(ttft_ns) >= LEAST_TARGETS else 0


def due_within_ns(ttft_ns: float) -> float:
    """Return the time within which waiting prompts should be computed. A target of 0 means that none is known."""
    return min(max(ttft_ns * DUE_SHARE, LEAST_DUE_NS), MOST_DUE_NS)


def prompts_wanted(served: float, waiting_ns: float, due_ns: float = LEAST_DUE_NS) -> float:
    """Return the number of workers that prompts keep busy.

    `served` is that number for the recently computed prompts, `waiting_ns` the time one worker would take for the
    queue, which is due within `due_ns`. While everything that arrives is served, `served` is the demand; a cluster that
    falls behind shows in the queue.
    """
    return served * _soon_share(due_ns) + waiting_ns / due_ns


def prompts_served(work: Workload) -> float:
    """Return the number of workers kept busy by recently computed prompts, which is a part of `work.prompts`."""
    return max(work.prompts - work.waiting_ns / work.due_ns, 0.0) / _soon_share(work.due_ns)


def _soon_share(due_ns: float) -> float:
    """Return the share of arriving prompts that must be computed soon; with a longer target, the latest ones may
    wait.
    """
    return AHEAD_NS / (AHEAD_NS + (due_ns - LEAST_DUE_NS) / DUE_SHARE)


FLOOD: Final = 3.0
"""The factor by which prompts must exceed the usual ones to count as a flood, in which all of them are due soon.

In one observation of a hundred, chance multiplies a steady load by up to 2.4.
"""
USUAL_NS: Final = 10_000_000_000
"""The time constant of the usual work."""


@dataclass(frozen=True, slots=True)
class UsualWork:
    """The running means of prompts and decodes."""

    workers: float = 0.0
    """The workers that the prompts would need if they were due soon."""
    at_ns: int = 0
    decodes: float = 0.0

    def seen(self, work: Workload, now_ns: int) -> "UsualWork":
        """Return the mean after another observation; before the first one there is no usual work."""
        weight = 1 - exp(-max(now_ns - self.at_ns, 0) / USUAL_NS) if self.at_ns else 0.0
        workers = self.workers + weight * (_soon(work) - self.workers)
        return UsualWork(workers, now_ns, self.decodes + weight * (work.decodes - self.decodes))

    def judged(self, work: Workload) -> Workload:
        """Return the work with its prompts due soon if they are a flood."""
        if work.due_ns == LEAST_DUE_NS or (soon := _soon(work)) <= FLOOD * self.workers:
            return work
        held_prompts = work.held_prompts * work.due_ns / LEAST_DUE_NS
        return replace(work, prompts=soon, held_prompts=held_prompts, due_ns=LEAST_DUE_NS)


NOTHING_USUAL: Final = UsualWork()


def _soon(work: Workload) -> float:
    """Return the workers that the prompts would need if the waiting ones were due within `LEAST_DUE_NS`."""
    return prompts_served(work) + work.waiting_ns / LEAST_DUE_NS
