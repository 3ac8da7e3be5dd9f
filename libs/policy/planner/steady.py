"""How many sequences would decode in another split of roles, once its pace has set in. Pure.

A worker that computes prompts beside its decodes lets each step take as long as TPOT allows, so sequences stay for
longer and more of them are there at once, with their KV. Weighed by the decodes of now, a split in which decodes are
left alone looks crowded that would not be; roles then drift towards ever more mixed workers that are ever fuller.
What stays as it is, whoever computes what, is the rate at which tokens are made.
"""

from dataclasses import dataclass, replace
from typing import Final

from libs.policy.pressure.splits import WorkerProfile, Workload, split
from libs.policy.worker.slack import IN_HAND

MOST_BUSY: Final = 0.9
"""Of a decode worker's time, what grows with its sequences: beyond it a pace that would set in is none."""
MOST_CHANGE: Final = 3.0
"""Bound on the factor by which decodes are taken to change."""


@dataclass(frozen=True, slots=True)
class DecodePace:
    """What is known of decodes as roles stand."""

    engine: WorkerProfile
    work: Workload
    tokens_per_ns: float
    """That they make; 0: none."""

    @classmethod
    def of(cls, engine: WorkerProfile, work: Workload, prefill: int, mixed: int, *, rides: bool) -> "DecodePace":
        """From the split as it is. `rides`: whether mixed workers compute prompts now."""
        if not work.decodes or not mixed or not work.tpot_ns:
            return cls(engine, work, 0.0)
        alone_ns = _step_ns(engine, work, mixed)
        step_ns = _filled_ns(engine, work, prefill, mixed, alone_ns) if rides else alone_ns
        return cls(engine, work, work.decodes / step_ns if step_ns else 0.0)

    def work_in(self, prefill: int, mixed: int, *, rides: bool) -> Workload:
        """The work, with the decodes that there would be."""
        if not self.tokens_per_ns or not mixed:
            return self.work
        work, model = self.work, self.engine.step_time
        each_ns = model.decode_sequence_ns + model.decode_kv_token_ns * work.kv_tokens / work.decodes
        busy = min(self.tokens_per_ns / mixed * each_ns, MOST_BUSY)
        step_ns = model.reading_ns(work.decodes / mixed) / (1 - busy)
        if rides:
            full = self._with(work.tpot_ns * (1 - IN_HAND))
            step_ns = _filled_ns(self.engine, full, prefill, mixed, step_ns)
        return self._with(step_ns)

    def _with(self, step_ns: float) -> Workload:
        """Sequences whose steps take so long."""
        work = self.work
        decodes = min(max(self.tokens_per_ns * step_ns, work.decodes / MOST_CHANGE), work.decodes * MOST_CHANGE)
        share = decodes / work.decodes
        return replace(work, decodes=max(round(decodes), 1), kv_tokens=round(work.kv_tokens * share))


def _step_ns(engine: WorkerProfile, work: Workload, mixed: int) -> float:
    """Of the decodes alone."""
    model, each = engine.step_time, work.decodes / mixed
    kv_ns = model.decode_kv_token_ns * work.kv_tokens / mixed
    return model.reading_ns(each) + model.decode_sequence_ns * each + kv_ns


def _filled_ns(engine: WorkerProfile, work: Workload, prefill: int, mixed: int, alone_ns: float) -> float:
    """With prompts beside them: as far towards the target as prompts press."""
    most_ns = work.tpot_ns * (1 - IN_HAND)
    if alone_ns >= most_ns:
        return alone_ns
    pressure = split(engine, work, prefill, mixed).prompt_pressure
    return alone_ns + (most_ns - alone_ns) * min(pressure, 1.0)
