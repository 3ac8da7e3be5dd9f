"""The expected and the actual effects of decisions: an outlook, and a fluid replay of the demand that arrived.

The counterfactual of a decision is computed in closed form, without a simulation. Arrived prompts are computed at the
speed of the split that would have stayed, and the excess waits. Decodes run on that split's workers. The chosen split
is replayed in the same way, so the two differ only by the decision.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from libs.policy.planner.due import prompts_served, prompts_wanted
from libs.policy.pressure import Split, WorkerProfile, Workload, decode_step_ns, lent_step_ns, prompt_speed, ride, split

MAX_NS: Final = 3_600_000_000_000
"""The bound on a predicted time, also used for a phase without workers."""


@dataclass(frozen=True, slots=True)
class RequestOutlook:
    """The prediction for requests that arrive now."""

    ttft_ns: float
    """The time from the arrival of a prompt of one chunk to its first token."""
    tpot_ns: float
    served: float
    """The share of the work done in time, 0..1."""


# The outlook is first-order: the queue is computed at the speed of the split, and a new prompt after it. Decodes are
# spread evenly over their workers. Measured figures are reported beside the outlook later.
def outlook(engine: WorkerProfile, work: Workload, split: Split, lending: float | None = None) -> RequestOutlook:
    """Predict for a split in which `lending` decode workers (by default all) compute prompts as far as TPOT allows."""
    speed = prompt_speed(engine, work, split.prefill, split.mixed, lending)
    chunk_ns = engine.chunk_tokens / engine.chunk_speed
    ttft_ns = work.waiting_ns / speed + chunk_ns if speed else MAX_NS
    tpot_ns = _tpot_ns(engine, work, split, rides=lending is None or lending > 0)
    return RequestOutlook(min(ttft_ns, MAX_NS), min(tpot_ns, MAX_NS), served_of(split))


def served_of(split: Split) -> float:
    """Return the share of the work that a split completes in time, 0..1."""
    return min(1.0, 1.0 / split.pressure) if split.pressure else 1.0


def _tpot_ns(engine: WorkerProfile, work: Workload, split: Split, *, rides: bool) -> float:
    """Return the time of a decode step alone, lengthened towards the target by prompts that share the step."""
    if not work.decodes or not split.mixed:
        return 0.0
    alone_ns = decode_step_ns(engine, float(work.decodes), float(work.kv_tokens), float(split.mixed))
    if not rides or not ride(engine, work, split.mixed):
        return alone_ns
    return lent_step_ns(alone_ns, work.tpot_ns, split.prompt_pressure)


METHOD: Final = "closed_form"
NS_PER_HOUR: Final = 3_600_000_000_000
MOST_WAITING_NS: Final = 3_600_000_000_000.0
"""The bound on a replayed backlog, in ns of one worker."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A split of roles replayed under the demand that arrived."""

    prefill: int
    mixed: int
    waiting_ns: float
    """The work of waiting prompts, in ns of one worker."""
    lasted_ns: int = 0
    # This field and those below are integrals over `lasted_ns`.
    ttft_ns: float = 0.0
    tpot_ns: float = 0.0
    served: float = 0.0
    prompt_pressure: float = 0.0
    decode_pressure: float = 0.0

    def mean(self) -> "Replay":
        """Return the replay with its integrals divided by its duration."""
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
class DemandSample:
    """The demand that arrived between two decisions, and the work present at the later one."""

    engine: WorkerProfile
    work: Workload
    inflow: float
    """The prompts that arrived, as the number of workers they would keep busy."""
    lasted_ns: int


def came(engine: WorkerProfile, before: Workload, now: Workload, speed: float, lasted_ns: int) -> DemandSample:
    """Estimate the demand between two samples of a model.

    `speed` is the prompt speed in between, in prefill workers; computed prompts also arrived.
    """
    computed = min(prompts_served(now), max(speed, 0.0))
    grown = (now.waiting_ns - before.waiting_ns) / max(lasted_ns, 1)
    return DemandSample(engine, now, max(computed + grown, 0.0), lasted_ns)


def replayed(state: Replay, sample: DemandSample) -> Replay:
    """Return the replay advanced by the demand of one sample."""
    speed = prompt_speed(sample.engine, sample.work, state.prefill, state.mixed)
    waiting_ns = min(max(state.waiting_ns + (sample.inflow - speed) * sample.lasted_ns, 0.0), MOST_WAITING_NS)
    prompts = prompts_wanted(sample.inflow, waiting_ns, sample.work.due_ns)
    work = replace(sample.work, prompts=prompts, waiting_ns=waiting_ns)
    at = split(sample.engine, work, state.prefill, state.mixed)
    seen: RequestOutlook = outlook(sample.engine, work, at)
    lasted = sample.lasted_ns
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
    """The reason for lost work that another split of the same workers would have served in time."""

    # The planner had decided or was about to, and the split followed later.
    LATE = "late"
    # Workers rested or were pinned, or it was quiet hours.
    HELD = "held"
    LIMITS = "limits"
    # The planner may not act: advisory mode, no token, or an unknown leader.
    ADVISORY = "advisory"
    # The planner considered the present split equally good, within the error of its predictions.
    BEST = "best"
    # No split of the present workers serves all the work; more workers would have.
    TOO_SMALL = "too_small"


@dataclass(frozen=True, slots=True)
class HindsightLoss:
    """The loss in one sample, by cause."""

    cause: LossCause
    lost_gpu_ns: float
    """The GPU time of work that the best split would have served in time and the present one did not."""


def loss(now: Split, best: Split | None, cause: LossCause, *, gpus: int, lasted_ns: int) -> list[HindsightLoss]:
    """Return the loss compared with the best split of the same workers, and that split's loss compared with unlimited
    workers.
    """
    served = served_of(now)
    within = served if best is None else max(served_of(best), served)
    whole = gpus * lasted_ns
    found = [
        HindsightLoss(cause, (within - served) * whole),
        HindsightLoss(LossCause.TOO_SMALL, (1.0 - within) * whole),
    ]
    return [each for each in found if each.lost_gpu_ns > 0]
