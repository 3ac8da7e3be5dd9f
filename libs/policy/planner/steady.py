"""How many sequences would decode in another split of roles, once its pace has settled.

A worker that computes prompts beside its decodes lets each step take as long as TPOT allows. Sequences then stay
longer, so more of them are there at once, with their KV. Rated by the present decodes, a split with separate
decodes looks crowded although it would not be. Roles would then drift towards ever more and ever fuller mixed
workers. The rate at which tokens are generated is what stays the same in every split.
"""

from dataclasses import dataclass
from typing import Final

from libs.policy.pressure.numbers import N, least, most, rounded, where
from libs.policy.pressure.splits import WorkerProfile, Workload, decode_step_ns, prompt_pressure
from libs.policy.pressure.step_times import reading_ns
from libs.policy.worker.slack import IN_HAND

MOST_BUSY: Final = 0.9
"""The bound on the share of a decode worker's time that grows with its sequences; beyond it no pace settles."""
MOST_CHANGE: Final = 3.0
"""The bound on the factor by which decodes are assumed to change."""


@dataclass(frozen=True, slots=True)
class DecodePace:
    """The decode rate in the present split."""

    engine: WorkerProfile
    work: Workload
    tokens_per_ns: float
    """The tokens generated per nanosecond; 0 if nothing decodes."""
    filled: tuple[float, float] = (0.0, 0.0)
    """The decodes and their KV tokens if each step took all that TPOT allows."""

    @classmethod
    def of(cls, engine: WorkerProfile, work: Workload, prefill: int, mixed: int, *, rides: bool) -> "DecodePace":
        """Derive the pace from the present split. `rides`: whether mixed workers compute prompts now."""
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
        """Return the decodes and their KV tokens in one or many splits with at least one mixed worker each."""
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
    """Return the sequences and their KV tokens that generate `tokens_per_ns` in steps of `step_ns`."""
    decodes = least(most(tokens_per_ns * step_ns, work.decodes / MOST_CHANGE), work.decodes * MOST_CHANGE)
    return most(rounded(decodes), 1.0), rounded(work.kv_tokens * (decodes / work.decodes))


def _filled_ns(work: Workload, pressure: N, alone_ns: N) -> N:
    """Return the time of a decode step lengthened by prompts, as far towards the target as prompts press."""
    most_ns = work.tpot_ns * (1 - IN_HAND)
    return where(alone_ns >= most_ns, alone_ns, alone_ns + (most_ns - alone_ns) * least(pressure, 1.0))
