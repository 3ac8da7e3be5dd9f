"""What a decision brought, and what was lost by all of them: a fluid replay of the demand that came. Pure.

A decision's counterfactual is closed-form, and no simulation: the prompts that came are computed at the speed of the
split that would have stayed, what is more than that waits, and decodes press on the workers that would have been there.
The split that was taken is replayed in the same way beside it, so that the two differ by the decision alone.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from libs.policy.planner.outlook import RequestOutlook, outlook, served_of
from libs.policy.pressure.splits import Split, WorkerProfile, Workload, prompt_speed, split

METHOD: Final = "closed_form"
NS_PER_HOUR: Final = 3_600_000_000_000
MOST_WAITING_NS: Final = 3_600_000_000_000.0
"""What a replayed backlog grows to at most."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One split of roles under the demand that came."""

    prefill: int
    mixed: int
    waiting_ns: float
    """Prompts that wait, in time of one worker."""
    lasted_ns: int = 0
    ttft_ns: float = 0.0
    """Sums over time from here on."""
    tpot_ns: float = 0.0
    served: float = 0.0
    prompt_pressure: float = 0.0
    decode_pressure: float = 0.0

    def mean(self) -> "Replay":
        """The sums over the time that it lasted."""
        lasted = max(self.lasted_ns, 1)
        return replace(
            self,
            ttft_ns=self.ttft_ns / lasted,
            tpot_ns=self.tpot_ns / lasted,
            served=self.served / lasted,
            prompt_pressure=self.prompt_pressure / lasted,
            decode_pressure=self.decode_pressure / lasted,
        )


@dataclass(frozen=True, slots=True)
class Came:
    """What came between two decisions: the present work, and the prompts that are new in it."""

    engine: WorkerProfile
    work: Workload
    inflow: float
    """Prompts that came, in workers that they would keep busy."""
    lasted_ns: int


def came(engine: WorkerProfile, before: Workload, now: Workload, speed: float, lasted_ns: int) -> Came:
    """From two looks at a model. `speed`: of its prompts in between, in prefill workers: what was computed came too."""
    computed = min(max(now.prompts - now.waiting_ns / 1e9, 0.0), max(speed, 0.0))
    grown = (now.waiting_ns - before.waiting_ns) / max(lasted_ns, 1)
    return Came(engine, now, max(computed + grown, 0.0), lasted_ns)


def replayed(state: Replay, what: Came) -> Replay:
    """A replay, one look later."""
    speed = prompt_speed(what.engine, what.work, state.prefill, state.mixed)
    waiting_ns = min(max(state.waiting_ns + (what.inflow - speed) * what.lasted_ns, 0.0), MOST_WAITING_NS)
    work = replace(what.work, prompts=what.inflow + waiting_ns / 1e9, waiting_ns=waiting_ns)
    at = split(what.engine, work, state.prefill, state.mixed)
    seen: RequestOutlook = outlook(what.engine, work, at)
    lasted = what.lasted_ns
    return replace(
        state,
        waiting_ns=waiting_ns,
        lasted_ns=state.lasted_ns + lasted,
        ttft_ns=state.ttft_ns + seen.ttft_ns * lasted,
        tpot_ns=state.tpot_ns + seen.tpot_ns * lasted,
        served=state.served + seen.served * lasted,
        prompt_pressure=state.prompt_pressure + min(at.prompt_pressure, 1e3) * lasted,
        decode_pressure=state.decode_pressure + min(at.decode_pressure, 1e3) * lasted,
    )


class LossCause(Enum):
    """Why work was lost that another split of the same workers would have served in time."""

    LATE = "late"
    """The planner had decided, or was about to: the split followed."""
    HELD = "held"
    """Workers rested, were pinned, or it was quiet."""
    LIMITS = "limits"
    ADVISORY = "advisory"
    """It may not act: mode advisory, no token, or nobody knows who leads."""
    BEST = "best"
    """It took the present split for as good, within what predictions are off."""
    TOO_SMALL = "too_small"
    """No split of the workers there are serves it all: more workers would have."""


@dataclass(frozen=True, slots=True)
class HindsightLoss:
    """Of one look."""

    cause: LossCause
    lost_gpu_ns: float
    """GPU time of work that the best split would have served in time and the present one did not."""


def loss(now: Split, best: Split | None, cause: LossCause, *, gpus: int, lasted_ns: int) -> list[HindsightLoss]:
    """What the present split lost against the best of the same workers, and that one against as many as it takes."""
    served = served_of(now)
    within = served if best is None else max(served_of(best), served)
    whole = gpus * lasted_ns
    found = [
        HindsightLoss(cause, (within - served) * whole),
        HindsightLoss(LossCause.TOO_SMALL, (1.0 - within) * whole),
    ]
    return [each for each in found if each.lost_gpu_ns > 0]
