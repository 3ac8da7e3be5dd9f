"""How many sequences would decode in another split of roles, once its pace has set in. Pure.

A worker that computes prompts beside its decodes lets each step take as long as TPOT allows, so sequences stay for
longer and more of them are there at once, with their KV. Weighed by the decodes of now, a split in which decodes are
left alone looks crowded that would not be; roles then drift towards ever more mixed workers that are ever fuller.
What stays as it is, whoever computes what, is the rate at which tokens are made.
"""

from dataclasses import dataclass
from typing import Final

from libs.policy.pressure.numbers import N, least, most, rounded, where
from libs.policy.pressure.splits import WorkerProfile, Workload, decode_step_ns, prompt_pressure
from libs.policy.pressure.step_times import reading_ns
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
    filled: tuple[float, float] = (0.0, 0.0)
    """(decodes, their KV tokens) that there would be where each step took all that TPOT allows."""

    @classmethod
    def of(cls, engine: WorkerProfile, work: Workload, prefill: int, mixed: int, *, rides: bool) -> "DecodePace":
        """From the split as it is. `rides`: whether mixed workers compute prompts now."""
        if not work.decodes or not mixed or not work.tpot_ns:
            return cls(engine, work, 0.0)
        decodes, kv_tokens = float(work.decodes), float(work.kv_tokens)
        alone_ns = decode_step_ns(engine, decodes, kv_tokens, float(mixed))
        pressure = prompt_pressure(engine, work, decodes, kv_tokens, prefill=float(prefill), mixed=float(mixed))
        step_ns = _filled_ns(work, pressure, alone_ns) if rides else alone_ns
        if not step_ns:
            return cls(engine, work, 0.0)
        tokens_per_ns = work.decodes / step_ns
        return cls(engine, work, tokens_per_ns, _decodes(work, tokens_per_ns, work.tpot_ns * (1 - IN_HAND)))

    def decodes_in(self, prefill: N, mixed: N, *, rides: bool) -> tuple[N, N]:
        """(decodes, their KV tokens) that there would be in a split, or in many side by side, of at least one mixed
        worker each."""
        if not self.tokens_per_ns:
            return self.work.decodes + 0.0 * mixed, self.work.kv_tokens + 0.0 * mixed
        work, model = self.work, self.engine.step_time
        each_ns = model.decode_sequence_ns + model.decode_kv_token_ns * work.kv_tokens / work.decodes
        busy = least(self.tokens_per_ns / mixed * each_ns, MOST_BUSY)
        step_ns = reading_ns(model, work.decodes / mixed) / (1 - busy)
        if rides:
            decodes, kv_tokens = self.filled
            filled = decodes + 0.0 * mixed, kv_tokens + 0.0 * mixed
            pressure = prompt_pressure(self.engine, work, *filled, prefill=prefill, mixed=mixed)
            step_ns = _filled_ns(work, pressure, step_ns)
        return _decodes(work, self.tokens_per_ns, step_ns)


def _decodes(work: Workload, tokens_per_ns: float, step_ns: N) -> tuple[N, N]:
    """(sequences, their KV tokens) that make `tokens_per_ns` in steps of `step_ns`."""
    decodes = least(most(tokens_per_ns * step_ns, work.decodes / MOST_CHANGE), work.decodes * MOST_CHANGE)
    return most(rounded(decodes), 1.0), rounded(work.kv_tokens * (decodes / work.decodes))


def _filled_ns(work: Workload, pressure: N, alone_ns: N) -> N:
    """A step of decodes with prompts beside them: as far towards the target as prompts press."""
    most_ns = work.tpot_ns * (1 - IN_HAND)
    return where(alone_ns >= most_ns, alone_ns, alone_ns + (most_ns - alone_ns) * least(pressure, 1.0))
