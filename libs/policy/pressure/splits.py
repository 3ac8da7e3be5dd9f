"""How hard prompts and decodes press on a model's workers in any split of roles. Pure.

Pressure is work over what there is for it: above 1 it grows into a queue. A mixed worker serves both phases: decodes
first, prompts as far as TPOT leaves time. What that brings depends on how much of a prompt chunk hides behind decode's
reading of the weights, which the step-time model says; so the best split follows from it and is no setting.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from libs.policy.step_time import StepTimeModel
from libs.policy.worker.slack import IN_HAND, largest_batch

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
        if not self.held:
            return self
        share = min(speed / self.held_prompts, 1.0) if self.held_prompts else 1.0
        decodes = self.decodes + round(self.held * share)
        return replace(self, decodes=decodes, kv_tokens=self.kv_tokens + round(self.held_kv_tokens * share), held=0)


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
        return self.pressure + DECODE_COST * max(self.decode_pressure - DECODE_FULL, 0.0)


def ride(engine: WorkerProfile, work: Workload, mixed: float) -> float:
    """How fast each of `mixed` mixed workers computes prompts beside its decodes, of a prefill worker's speed."""
    if not mixed:
        return 0.0
    model, each = engine.step_time, work.decodes / mixed
    step_ns = work.tpot_ns * (1 - IN_HAND)
    if not each or not work.tpot_ns:
        return 1.0
    decode_ns = decode_step_ns(engine, work, mixed)
    if decode_ns >= step_ns:
        return 0.0
    reading_ns = model.reading_ns(each)
    prefill_ns = model.most_prefill_ns(step_ns, decode_ns, reading_ns)
    if prefill_ns < model.prefill_floor_ns:
        return 0.0
    tokens = _tokens(model, prefill_ns, engine.chunk_tokens)
    took_ns = model.mixed_ns(model.chunks_ns(tokens, tokens * tokens), decode_ns, reading_ns)
    return min(tokens / took_ns / engine.chunk_speed, 1.0) if took_ns else 1.0


def decode_step_ns(engine: WorkerProfile, work: Workload, mixed: float) -> float:
    """A step of the decodes alone, shared evenly by `mixed` workers, at least one."""
    model, each = engine.step_time, work.decodes / mixed
    return model.reading_ns(each) + model.decode_sequence_ns * each + model.decode_kv_token_ns * work.kv_tokens / mixed


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
    speed = _speed(engine, work, prefill, mixed, lent)
    prompts = _prompt_pressure(work, speed)
    batch, kv = decode_parts(engine, work.with_held(speed), mixed)
    return Split(round(prefill), round(mixed), prompts, max(batch, kv))


def prompt_pressure(engine: WorkerProfile, work: Workload, prefill: int, mixed: int) -> float:
    """That part alone of the split in which all mixed workers have budgets."""
    return _prompt_pressure(work, _speed(engine, work, prefill, mixed, mixed))


def _speed(engine: WorkerProfile, work: Workload, prefill: float, mixed: float, lent: float) -> float:
    speed = prompt_speed(engine, work, prefill, mixed, lent)
    return lent * LEAST_RIDE if lent and not speed else speed


def _prompt_pressure(work: Workload, speed: float) -> float:
    if speed:
        return work.prompts / speed
    return float("inf") if work.prompts else 0.0


def decode_parts(engine: WorkerProfile, work: Workload, mixed: float) -> tuple[float, float]:
    """Sequences over the largest batches that hold TPOT, and KV tokens over the room for them, on this many workers."""
    if not mixed:  # prompts too end with a decode
        none = float("inf") if work.decodes or work.prompts else 0.0
        return none, none
    if not work.decodes:
        return 0.0, 0.0
    most = most_decodes(engine, work.tpot_ns, max(work.kv_tokens // work.decodes, 1))
    room = engine.kv_tokens * KV_FILL
    return work.decodes / (most * mixed), work.kv_tokens / (room * mixed) if room else 0.0


@lru_cache(maxsize=1024)
def most_decodes(engine: WorkerProfile, tpot_ns: int, context_tokens: int) -> int:
    """Sequences that one worker decodes within the target, each of `tokens` tokens; at least one."""
    if not tpot_ns:
        return engine.max_sequences
    return max(largest_batch(engine.step_time, tpot_ns * (1 - IN_HAND), context_tokens, engine.max_sequences), 1)


def _tokens(model: StepTimeModel, prefill_ns: float, most: int) -> int:
    """Tokens of a chunk that takes so long, its squares left aside: they are alike wherever the prompt is computed."""
    if not model.prefill_token_ns:
        return most
    return min(max(int((prefill_ns - model.prefill_fixed_ns) / model.prefill_token_ns), 0), most)
