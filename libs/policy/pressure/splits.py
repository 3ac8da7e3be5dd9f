"""How hard prompts and decodes press on a model's workers in any split of roles. Pure.

Pressure is work over what there is for it: above 1 it grows into a queue. A mixed worker serves both phases: decodes
first, prompts as far as TPOT leaves time. What that brings depends on how much of a prompt chunk hides behind decode's
reading of the weights, which the step-time model says; so the best split follows from it and is no setting.
"""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from libs.policy.pressure.numbers import N, Numbers, Truths, least, most, over, rounded, where, whole
from libs.policy.pressure.step_times import chunk_ns, mixed_ns, most_prefill_ns, reading_ns
from libs.policy.step_time import MATRIX_ROWS, StepTimeModel
from libs.policy.worker.slack import IN_HAND

KV_FILL: Final = 0.9
"""Of KV room, what sequences may hold before decode counts as full: they grow, and prompts need some."""
DECODE_FULL: Final = 0.9
LEAST_RIDE: Final = 0.1
"""Of a prefill worker's speed, what mixed workers give prompts that nobody else computes, whatever their decodes."""
DECODE_COST: Final = 10.0
"""Of decode pressure beyond `DECODE_FULL`, in pressure."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerProfile:
    """What one worker can do; all of a model are taken to be alike."""

    step_time: StepTimeModel
    chunk_tokens: int
    """Prompt tokens of a step at most."""
    max_sequences: int
    kv_tokens: int
    """Room for; 0: without a bound."""
    chunk_speed: float = field(init=False, repr=False)
    """Prompt tokens a nanosecond in steps of prompts alone."""
    _key: tuple[StepTimeModel, int, int, int] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        chunk = self.chunk_tokens
        object.__setattr__(self, "chunk_speed", chunk / max(self.step_time.chunks_ns(chunk, chunk * chunk), 1.0))
        key = (self.step_time, chunk, self.max_sequences, self.kv_tokens)
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))  # asked for with each split that is weighed

    # By hand, as mypyc's classes bear no __hash__ beside an __eq__ that a dataclass makes.
    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, WorkerProfile) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Workload:
    """What a model's workers have to do."""

    prompts: float
    """Workers that would be busy with prompts alone all the time."""
    decodes: int
    """Sequences that decode, or soon will."""
    kv_tokens: int
    """That they hold."""
    tpot_ns: int
    """The target of the typical one."""
    waiting_ns: float = 0.0
    """That one worker would take for the prompts that wait; a part of `prompts`."""
    held: int = 0
    """Sequences beside `decodes` that wait for a place to decode, before their prompts are computed: of them as many
    press on decode as prompts can be computed soon."""
    held_kv_tokens: int = 0
    """That all of them would hold."""
    held_prompts: float = 0.0
    """Workers that would have all their prompts computed soon."""

    def with_held(self, speed: float) -> "Workload":
        """Those held that can soon decode counted in, where prompts are computed as fast as by `speed` workers."""
        decodes, kv_tokens = _with_held(self, self.decodes, self.kv_tokens, speed)
        return replace(self, decodes=round(decodes), kv_tokens=round(kv_tokens), held=0)


@dataclass(frozen=True, slots=True)
class Split:
    """Workers in each role, and how hard both phases would press on them.

    `mixed` are all that decode, whatever their budget of prompts.
    """

    prefill: int
    mixed: int
    prompt_pressure: float
    decode_pressure: float

    @property
    def pressure(self) -> float:
        """Pressure of the phase that is worse off."""
        return max(self.prompt_pressure, self.decode_pressure)

    @property
    def cost(self) -> float:
        """By which splits are compared. Prompts beyond what there is for them wait; decodes beyond it break the pace of
        all that run, and preempt each other: that costs many times as much."""
        return _cost(self.prompt_pressure, self.decode_pressure)


@dataclass(frozen=True, slots=True)
class Splits:
    """Many of them side by side: [splits] each."""

    prefill: Numbers
    mixed: Numbers
    prompt_pressure: Numbers
    decode_pressure: Numbers

    def costs(self) -> Numbers:
        """Of each, as `Split.cost`."""
        return _cost(self.prompt_pressure, self.decode_pressure)

    def at(self, place: int) -> Split:
        """One of them."""
        return Split(
            int(self.prefill[place]),
            int(self.mixed[place]),
            float(self.prompt_pressure[place]),
            float(self.decode_pressure[place]),
        )


def _cost(prompts: N, decodes: N) -> N:
    return most(prompts, decodes) + DECODE_COST * most(decodes - DECODE_FULL, 0.0)


def ride(engine: WorkerProfile, work: Workload, mixed: float) -> float:
    """How fast each of `mixed` mixed workers computes prompts beside its decodes, of a prefill worker's speed."""
    return _ride(engine, work.tpot_ns, work.decodes, work.kv_tokens, mixed)


def decode_step_ns(engine: WorkerProfile, decodes: N, kv_tokens: N, mixed: N) -> N:
    """A step of the decodes alone, shared evenly by `mixed` workers; 0 where there are none."""
    return _alone_ns(engine, decodes, kv_tokens, mixed)[0]


def prompt_speed(
    engine: WorkerProfile, work: Workload, prefill: float, mixed: float, lending: float | None = None
) -> float:
    """Speed of these workers of both roles together, in prefill workers; `lending` of the mixed ones compute prompts,
    by default all."""
    lent = mixed if lending is None else lending
    return prefill + lent * ride(engine, work, mixed) if lent else prefill + 0.0


def split(
    engine: WorkerProfile,
    work: Workload,
    prefill: float,
    mixed: float,
    *,
    budgets: bool = True,
    lending: float | None = None,
) -> Split:
    """With these numbers of workers; one that is slow counts for less than one. `lending`: how many of the mixed
    ones compute prompts too, by default all where there are `budgets`, else none."""
    lent = (mixed if budgets else 0) if lending is None else min(lending, mixed)
    prompts, decodes = pressed(engine, work, work.decodes, work.kv_tokens, prefill=prefill, mixed=mixed, lent=lent)
    return Split(round(prefill), round(mixed), prompts, decodes)


def pressed(
    engine: WorkerProfile, work: Workload, decodes: N, kv_tokens: N, *, prefill: N, mixed: N, lent: N
) -> tuple[N, N]:
    """(prompt pressure, decode pressure) of one split, or of many side by side. `decodes`, `kv_tokens`: in place of
    the work's, as another split may change their number."""
    speed = _speed(engine, work, decodes, kv_tokens, prefill=prefill, mixed=mixed, lent=lent)
    prompts = _prompt_pressure(work, speed)
    decodes, kv_tokens = _with_held(work, decodes, kv_tokens, speed)
    batch, kv = _decode_parts(engine, work, decodes, kv_tokens, mixed)
    return prompts, most(batch, kv)


def prompt_pressure(engine: WorkerProfile, work: Workload, decodes: N, kv_tokens: N, *, prefill: N, mixed: N) -> N:
    """That part alone of the split in which all mixed workers have budgets."""
    return _prompt_pressure(work, _speed(engine, work, decodes, kv_tokens, prefill=prefill, mixed=mixed, lent=mixed))


def decode_parts(engine: WorkerProfile, work: Workload, mixed: float) -> tuple[float, float]:
    """Sequences over the largest batches that hold TPOT, and KV tokens over the room for them, on this many workers."""
    return _decode_parts(engine, work, work.decodes, work.kv_tokens, mixed)


def most_decodes(engine: WorkerProfile, tpot_ns: int, context_tokens: N) -> N:
    """Sequences that one worker decodes within the target, each of `context_tokens`; at least one. `largest_batch`, of
    which this is the closed form, searches."""
    if not tpot_ns:
        return context_tokens * 0 + engine.max_sequences
    model, step_ns, bound = engine.step_time, tpot_ns * (1 - IN_HAND), engine.max_sequences

    def fits(batch: N) -> bool | Truths:
        kv_ns = model.decode_kv_token_ns * (batch * context_tokens)
        return reading_ns(model, batch) + model.decode_sequence_ns * batch + kv_ns <= step_ns

    each_ns = model.decode_sequence_ns + model.decode_kv_token_ns * context_tokens
    left_ns = step_ns - model.decode_fixed_ns
    matrix_ns = left_ns - model.decode_matrix_ns
    few = least(over(left_ns, each_ns, inf if left_ns >= 0 else 0.0), MATRIX_ROWS - 1)
    many = over(matrix_ns, each_ns, inf if matrix_ns >= 0 else 0.0)
    guess = whole(most(least(where(many >= MATRIX_ROWS, many, few), bound), 1.0))
    # Rounding may have put it on the wrong side of the limit.
    lower = where(fits(guess), guess, guess - 1)
    return most(where((guess + 1 <= bound) & fits(guess + 1), guess + 1, lower), 1)


def _alone_ns(engine: WorkerProfile, decodes: N, kv_tokens: N, mixed: N) -> tuple[N, N]:
    """(the step, the part of it in which weights are read)."""
    model, each = engine.step_time, over(decodes, mixed, 0.0)
    read_ns = reading_ns(model, each)
    kv_ns = over(model.decode_kv_token_ns * kv_tokens, mixed, 0.0)
    return read_ns + model.decode_sequence_ns * each + kv_ns, read_ns


def _ride(engine: WorkerProfile, tpot_ns: int, decodes: N, kv_tokens: N, mixed: N) -> N:
    if not tpot_ns:
        return where(mixed == 0, 0.0, 0.0 * mixed + 1.0)
    model, step_ns = engine.step_time, tpot_ns * (1 - IN_HAND)
    decode_ns, read_ns = _alone_ns(engine, decodes, kv_tokens, mixed)
    prefill_ns = most_prefill_ns(model, step_ns, decode_ns, read_ns)
    tokens = _tokens(model, prefill_ns, engine.chunk_tokens)
    took_ns = mixed_ns(model, chunk_ns(model, tokens), decode_ns, read_ns)
    speed = least(over(tokens, took_ns, inf) / engine.chunk_speed, 1.0)
    speed = where(decode_ns >= step_ns, 0.0, speed)
    speed = where(prefill_ns < model.prefill_floor_ns, 0.0, speed) if model.prefill_floor_ns else speed
    return where(mixed == 0, 0.0, where(decodes == 0, 1.0, speed))


def _speed(engine: WorkerProfile, work: Workload, decodes: N, kv_tokens: N, *, prefill: N, mixed: N, lent: N) -> N:
    speed = prefill + lent * _ride(engine, work.tpot_ns, decodes, kv_tokens, mixed)
    return where(speed == 0, lent * LEAST_RIDE, speed)


def _prompt_pressure(work: Workload, speed: N) -> N:
    return over(work.prompts, speed, inf if work.prompts else 0.0)


def _with_held(work: Workload, decodes: N, kv_tokens: N, speed: N) -> tuple[N, N]:
    if not work.held:
        return decodes, kv_tokens
    share = least(speed / work.held_prompts if work.held_prompts else speed * 0.0 + 1.0, 1.0)
    return decodes + rounded(work.held * share), kv_tokens + rounded(work.held_kv_tokens * share)


def _decode_parts(engine: WorkerProfile, work: Workload, decodes: N, kv_tokens: N, mixed: N) -> tuple[N, N]:
    context = most(whole(over(kv_tokens, decodes, 0.0)), 1)
    room = engine.kv_tokens * KV_FILL
    batch = over(decodes, most_decodes(engine, work.tpot_ns, context) * mixed, 0.0)
    kv = over(kv_tokens, room * mixed, 0.0)
    # Prompts too end with a decode.
    nobody = inf if work.prompts else where(decodes == 0, 0.0, decodes * 0.0 + inf)
    return where(mixed == 0, nobody, batch), where(mixed == 0, nobody, where(decodes == 0, 0.0, kv))


def _tokens(model: StepTimeModel, prefill_ns: N, bound: int) -> N:
    """Tokens of a chunk that takes so long, its squares left aside: they are alike wherever the prompt is computed."""
    if not model.prefill_token_ns:
        return prefill_ns * 0.0 + bound
    return least(most(whole((prefill_ns - model.prefill_fixed_ns) / model.prefill_token_ns), 0.0), bound)
