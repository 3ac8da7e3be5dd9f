"""How many sequences would decode in another split of roles, once its pace has set in. Pure.

A worker that computes prompts beside its decodes lets each step take as long as TPOT allows, so sequences stay for
longer and more of them are there at once, with their KV. Weighed by the decodes of now, a split in which decodes are
left alone looks crowded that would not be; roles then drift towards ever more mixed workers that are ever fuller.
What stays as it is, whoever computes what, is the rate at which tokens are made.
"""

from dataclasses import dataclass
from typing import Final

from libs.policy.pressure.splits import WorkerProfile, Workload, decode_step_ns, prompt_pressure
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
    filled: Workload | None = None
    """The work, with the decodes that there would be where each step took all that TPOT allows; None: no tokens."""

    @classmethod
    def of(cls, engine: WorkerProfile, work: Workload, prefill: int, mixed: int, *, rides: bool) -> "DecodePace":
        """From the split as it is. `rides`: whether mixed workers compute prompts now."""
        if not work.decodes or not mixed or not work.tpot_ns:
            return cls(engine, work, 0.0)
        alone_ns = decode_step_ns(engine, work, mixed)
        step_ns = _filled_ns(engine, work, prefill, mixed, alone_ns) if rides else alone_ns
        if not step_ns:
            return cls(engine, work, 0.0)
        tokens_per_ns = work.decodes / step_ns
        return cls(engine, work, tokens_per_ns, _with(work, tokens_per_ns, work.tpot_ns * (1 - IN_HAND)))

    def work_in(self, prefill: int, mixed: int, *, rides: bool) -> Workload:
        """The work, with the decodes that there would be."""
        if not self.tokens_per_ns or not mixed:
            return self.work
        work, model = self.work, self.engine.step_time
        each_ns = model.decode_sequence_ns + model.decode_kv_token_ns * work.kv_tokens / work.decodes
        busy = min(self.tokens_per_ns / mixed * each_ns, MOST_BUSY)
        step_ns = model.reading_ns(work.decodes / mixed) / (1 - busy)
        if rides and self.filled is not None:
            step_ns = _filled_ns(self.engine, self.filled, prefill, mixed, step_ns)
        return _with(work, self.tokens_per_ns, step_ns)


def _with(work: Workload, tokens_per_ns: float, step_ns: float) -> Workload:
    """With the sequences that make so many tokens in steps that take so long."""
    decodes = min(max(tokens_per_ns * step_ns, work.decodes / MOST_CHANGE), work.decodes * MOST_CHANGE)
    kv_tokens = round(work.kv_tokens * (decodes / work.decodes))
    return Workload(  # `replace` takes ten times as long, and this is most of what a decision does
        work.prompts, max(round(decodes), 1), kv_tokens, work.tpot_ns,
        work.waiting_ns, work.held, work.held_kv_tokens, work.held_prompts,
    )  # fmt: skip


def _filled_ns(engine: WorkerProfile, work: Workload, prefill: int, mixed: int, alone_ns: float) -> float:
    """With prompts beside them: as far towards the target as prompts press."""
    most_ns = work.tpot_ns * (1 - IN_HAND)
    if alone_ns >= most_ns:
        return alone_ns
    pressure = prompt_pressure(engine, work, prefill, mixed)
    return alone_ns + (most_ns - alone_ns) * min(pressure, 1.0)
