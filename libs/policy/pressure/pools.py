"""A model's pressures in its present roles, and the least pressure that any roles would leave."""

from dataclasses import dataclass

import numpy as np

from libs.policy.pressure.splits import (
    KV_FILL,
    Split,
    Splits,
    WorkerProfile,
    Workload,
    decode_parts,
    most_decodes,
    pressed,
    prompt_speed,
    split,
)


@dataclass(frozen=True, slots=True)
class RoleCounts:
    """Workers by their present role; slow ones count for less than one, so the counts are fractional."""

    prefill: float
    mixed: float
    """Decode workers, including those with a prompt budget."""
    lending: float
    """The part of `mixed` with a prompt budget."""

    @property
    def workers(self) -> int:
        """The number of whole workers, at least one."""
        return max(round(self.prefill + self.mixed), 1)


@dataclass(frozen=True, slots=True)
class Pressures:
    """Work over capacity by phase; above 1 it grows into a queue."""

    prefill: float
    batch: float
    """Sequences over the largest batches that keep TPOT."""
    kv: float
    """KV that sequences need over the room for it."""
    least: Split
    """The roles that leave the least pressure on the worse phase."""
    largest_batch: int
    """Sequences that all decode workers can run within TPOT."""
    kv_room_tokens: int
    """KV room of all decode workers; 0 if there is no bound."""
    sequences: int
    """Sequences that press on decode, including those that soon could."""
    kv_tokens: int
    """KV tokens that these sequences need."""

    @property
    def decode(self) -> float:
        """The greater of the batch and KV pressures."""
        return max(self.batch, self.kv)

    @property
    def cluster(self) -> float:
        """The least pressure over all roles."""
        return self.least.pressure


def pressures(engine: WorkerProfile, work: Workload, standing: RoleCounts) -> Pressures:
    """Return the pressures on pools of at least one worker."""
    whole = work.with_held(prompt_speed(engine, work, standing.prefill, standing.mixed, standing.lending))
    batch, kv = decode_parts(engine, whole, standing.mixed)
    context = max(whole.kv_tokens // max(whole.decodes, 1), 1)
    return Pressures(
        prefill=as_roles_stand(engine, work, standing).prompt_pressure,
        batch=batch,
        kv=kv,
        least=least_pressed(engine, work, standing.workers),
        largest_batch=round(most_decodes(engine, work.tpot_ns, context) * standing.mixed),
        kv_room_tokens=round(engine.kv_tokens * KV_FILL * standing.mixed),
        sequences=whole.decodes,
        kv_tokens=whole.kv_tokens,
    )


def as_roles_stand(engine: WorkerProfile, work: Workload, standing: RoleCounts) -> Split:
    """Return the split of the present roles, in which workers with a prompt budget count for prompts too."""
    return split(engine, work, standing.prefill, standing.mixed, lending=standing.lending)


def least_pressed(engine: WorkerProfile, work: Workload, workers: int) -> Split:
    """Return the split of `workers` with the least pressure; decode workers compute prompts as TPOT allows."""
    prefill = np.arange(workers, dtype=np.float64)
    mixed, same = workers - prefill, 0.0 * prefill
    decodes, kv_tokens = work.decodes + same, work.kv_tokens + same
    prompts, decodes = pressed(engine, work, decodes, kv_tokens, prefill=prefill, mixed=mixed, lent=mixed)
    return Splits(prefill, mixed, prompts, decodes).at(int(np.maximum(prompts, decodes).argmin()))


def fewest_workers(engine: WorkerProfile, work: Workload, workers: int, most: int) -> int | None:
    """Return the least number above `workers`, at most `most`, for which some roles leave a pressure of at most 1.

    None means that no such number does.
    """
    low, high = workers + 1, most
    if high < low or least_pressed(engine, work, high).pressure > 1:
        return None
    while low < high:
        middle = (low + high) // 2
        if least_pressed(engine, work, middle).pressure <= 1:
            high = middle
        else:
            low = middle + 1
    return low
