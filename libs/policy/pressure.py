"""The pressure of prompts and decodes on a model's workers in any split of roles.

Pressure is work over capacity: above 1 it grows into a queue. A mixed worker serves decodes first, then prompts as far
as TPOT leaves time. The gain depends on how much of a prompt chunk hides behind decode's reading of the weights, which
the step-time model predicts. So the best split follows from that model and is not a setting.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import floor, inf
from statistics import median_low
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from libs.policy.speed import PROMPTS_PART
from libs.policy.step_time import MATRIX_ROWS, StepTimeModel
from libs.policy.worker.pace import IN_HAND

Numbers = NDArray[np.float64]
Truths = NDArray[np.bool_]
N = TypeVar("N", float, Numbers)


# Pressures of one split and of many splits are computed by the same functions, which take a number or an array with one
# element per split.
def least(one: N, other: N | float) -> N:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.minimum(one, other)
    return min(one, other)


def most(one: N, other: N | float) -> N:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return max(one, other)


def where(condition: bool | Truths, then: N | float, other: N) -> N:
    """Return `then` where the condition holds, else `other`."""
    found: Any = other
    if not isinstance(condition, np.ndarray):
        found = then if condition else other
    elif np.count_nonzero(condition):  # most conditions hold nowhere, and this check takes a tenth of the time
        found = np.where(condition, then, other)
    return cast("N", found)


def over(one: N | float, other: N, none: float) -> N:
    """Return one / other elementwise, with `none` where `other` is 0."""
    if isinstance(other, np.ndarray):
        if np.count_nonzero(other) == other.size:
            return one / other
        nothing = other == 0
        return np.where(nothing, none, one / np.where(nothing, 1.0, other))
    return one / other if other else none


def whole(one: N) -> N:
    return np.floor(one) if isinstance(one, np.ndarray) else floor(one)


def rounded(one: N) -> N:
    """Round to the nearest whole number; ties go to the even one, as in `round`."""
    return np.rint(one) if isinstance(one, np.ndarray) else round(one)


# The methods of `StepTimeModel` take single numbers because engines call them many times a step. A test checks that
# these formulas agree with them.
def reading_ns(model: StepTimeModel, sequences: N) -> N:
    """Return decode's fixed time, in which the weights are read."""
    fixed_ns = (sequences > 0) * model.decode_fixed_ns
    if model.decode_matrix_ns:
        fixed_ns = fixed_ns + (sequences >= MATRIX_ROWS) * model.decode_matrix_ns
    return fixed_ns + 0.0 * sequences


def hiding_ns(model: StepTimeModel, sequences: N) -> N:
    """Return the part of `reading_ns` in which a prompt chunk can hide."""
    read_ns = reading_ns(model, sequences)
    if not model.saturating_sequences:
        return read_ns
    return read_ns * most(1 - sequences / model.saturating_sequences, 0.0)


def sequences_ns(model: StepTimeModel, sequences: N) -> N:
    """Return the part of a decode step that depends on the number of sequences but not on their KV."""
    own_ns = model.decode_sequence_ns * sequences
    if model.saturating_sequences:
        own_ns = own_ns + model.decode_wide_ns * most(sequences - model.saturating_sequences, 0.0)
    if model.graph_sequences:
        own_ns = own_ns + (sequences > model.graph_sequences) * model.graph_exit_ns
    return own_ns


def sequence_lines(model: StepTimeModel, sequences: N) -> list[tuple[N | float, float]]:
    """Return lines (fixed, per sequence) whose maximum is `sequences_ns`; `fixed` may be negative.

    The cost of leaving a CUDA graph is that at `sequences`, whatever the batch.
    """
    exit_ns: Any = 0.0
    if model.graph_sequences:
        exit_ns = (sequences > model.graph_sequences) * model.graph_exit_ns
    lines = [(exit_ns, model.decode_sequence_ns)]
    if model.saturating_sequences:
        wide_ns = model.decode_wide_ns
        lines.append((exit_ns - wide_ns * model.saturating_sequences, model.decode_sequence_ns + wide_ns))
    return lines


def chunk_ns(model: StepTimeModel, tokens: N) -> N:
    """Return the part of a prompt's first chunk that counts in a mixed step."""
    linear = model.prefill_fixed_ns + model.prefill_token_ns * tokens
    part_ns = linear + model.prefill_token_squared_ns * (tokens * tokens)
    return part_ns if model.saturating_sequences else most(part_ns, model.prefill_floor_ns)


def mixed_ns(model: StepTimeModel, prefill_ns: N, decode_ns: N, hidden_ns: N) -> N:
    """Return the time of a step from the times of its parts; `hidden_ns` is a result of `hiding_ns`."""
    whole_ns = prefill_ns + decode_ns - (1 - model.interference) * least(prefill_ns, hidden_ns)
    return most(whole_ns, model.prefill_floor_ns) if model.saturating_sequences else whole_ns


def most_prefill_ns(model: StepTimeModel, step_ns: N | float, decode_ns: N, hidden_ns: N) -> N:
    """Return the maximum of `chunk_ns` in a step of `step_ns`."""
    rest_ns = most(step_ns - decode_ns, 0.0)
    found_ns = rest_ns + (1 - model.interference) * hidden_ns
    if model.interference:
        found_ns = where(rest_ns < model.interference * hidden_ns, rest_ns / model.interference, found_ns)
    return where(step_ns < model.prefill_floor_ns, 0.0, found_ns) if model.saturating_sequences else found_ns


# Sequences grow and prompts need room, so decode counts as full at this share of KV.
KV_FILL: Final = 0.9
DECODE_FULL: Final = 0.9
# On a link that is used for this share of the time, transfers that arrive by chance wait as long as they take (M/D/1).
LINK_FULL: Final = 2 / 3
LEAST_RIDE: Final = 0.1
"""The share of a prefill worker's speed that mixed workers give to prompts if no other worker computes them."""
DECODE_COST: Final = 10.0
"""The cost of decode pressure beyond `DECODE_FULL`, in units of pressure."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerProfile:
    """The capability of one worker; all workers of a model are assumed to be alike."""

    step_time: StepTimeModel
    chunk_tokens: int
    max_sequences: int
    kv_tokens: int
    """KV room in tokens; 0 if there is no bound."""
    kv_token_ns: float = 0.0
    """The time in which a worker's link receives the KV of one token; 0 if unknown, in which case links impose no
    bound.
    """
    chunk_speed: float = field(init=False, repr=False)
    """Prompt tokens per nanosecond in steps of one prompt's first chunk."""
    _key: tuple[StepTimeModel, int, int, int, float] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        chunk = self.chunk_tokens
        object.__setattr__(self, "chunk_speed", self.speed_at(chunk))
        key = (self.step_time, chunk, self.max_sequences, self.kv_tokens, self.kv_token_ns)
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))  # needed for every split that is compared

    def speed_at(self, prompt_tokens: float) -> float:
        """Return the prompt tokens per nanosecond in full steps of prompts of this length; 0 means one chunk.

        The later tokens of a long prompt attend to more tokens and take longer. For mixed lengths, pass the mean
        weighted by tokens, in which long prompts count more.
        """
        chunk = self.chunk_tokens
        return chunk / max(self.step_time.chunks_ns(chunk, chunk * (prompt_tokens or chunk)), 1.0)

    # Written by hand, because mypyc rejects a __hash__ beside the __eq__ that a dataclass generates.
    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, WorkerProfile) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts and decodes that a model's workers have to compute."""

    prompts: float
    """The number of workers that prompts alone would keep busy."""
    decodes: int
    """The number of sequences that decode or soon will."""
    kv_tokens: int
    """The number of KV tokens that these sequences hold."""
    tpot_ns: int
    """The TPOT target of a typical sequence."""
    waiting_ns: float = 0.0
    """The time that one worker needs for the waiting prompts; a part of `prompts`."""
    held: int = 0
    """Further sequences that wait for a decode place before their prompts are computed.

    Only those whose prompts can be computed soon count as decode work.
    """
    held_kv_tokens: int = 0
    """KV tokens that all held sequences would hold."""
    held_prompts: float = 0.0
    """The number of workers that would compute all held prompts soon."""
    due_ns: float = 1e9
    """The time within which the waiting prompts should be computed."""

    def with_held(self, speed: float) -> "Workload":
        """Add the held sequences that can soon decode if prompts are computed at the speed of `speed` workers."""
        decodes, kv_tokens = _with_held(self, self.decodes, self.kv_tokens, speed)
        return replace(self, decodes=round(decodes), kv_tokens=round(kv_tokens), held=0)


MAX_PRESSURE: Final = 1_000.0
"""The bound on displayed pressures, which are infinite without workers for a phase."""


def figure(pressure: float) -> str:
    """Format a pressure for people, limited to `MAX_PRESSURE`."""
    return f"{pressure:.1f}" if pressure < MAX_PRESSURE else f"more than {MAX_PRESSURE:.0f}"


@dataclass(frozen=True, slots=True)
class Split:
    """Workers in each role, and the pressure of both phases on them.

    `mixed` counts all workers that decode, with or without a prompt budget.
    """

    prefill: int
    mixed: int
    prompt_pressure: float
    decode_pressure: float

    @property
    def pressure(self) -> float:
        return max(self.prompt_pressure, self.decode_pressure)

    @property
    def cost(self) -> float:
        """The cost by which splits are compared.

        Excess prompts wait. Excess decodes slow all running ones and preempt each other, which costs far more.
        """
        return _cost(self.prompt_pressure, self.decode_pressure)


@dataclass(frozen=True, slots=True)
class Splits:
    """Many splits; every array has one element per split."""

    prefill: Numbers
    mixed: Numbers
    prompt_pressure: Numbers
    decode_pressure: Numbers

    def costs(self) -> Numbers:
        return _cost(self.prompt_pressure, self.decode_pressure)

    def at(self, index: int) -> Split:
        return Split(
            int(self.prefill[index]),
            int(self.mixed[index]),
            float(self.prompt_pressure[index]),
            float(self.decode_pressure[index]),
        )


def _cost(prompts: N, decodes: N) -> N:
    return most(prompts, decodes) + DECODE_COST * most(decodes - DECODE_FULL, 0.0)


def ride(engine: WorkerProfile, work: Workload, mixed: float) -> float:
    """Return the speed at which each of `mixed` workers computes prompts beside its decodes, relative to a prefill
    worker.
    """
    return _ride(engine, work.tpot_ns, work.decodes, work.kv_tokens, mixed)


def decode_step_ns(engine: WorkerProfile, decodes: N, kv_tokens: N, mixed: N) -> N:
    """Return the time of a step of the decodes alone, shared evenly by `mixed` workers; 0 without decodes."""
    return _alone_ns(engine, decodes, kv_tokens, mixed)[0]


def prompt_speed(
    engine: WorkerProfile, work: Workload, prefill: float, mixed: float, lending: float | None = None
) -> float:
    """Return the joint prompt speed of workers of both roles, in prefill workers.

    `lending` of the mixed ones compute prompts, by default all.
    """
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
    """Return the split for these numbers of workers; a slow worker counts for less than one.

    `lending` of the mixed ones compute prompts too. By default all do if there are `budgets`, otherwise none.
    """
    lent = (mixed if budgets else 0) if lending is None else min(lending, mixed)
    prompts, decodes = pressed(engine, work, work.decodes, work.kv_tokens, prefill=prefill, mixed=mixed, lent=lent)
    return Split(round(prefill), round(mixed), prompts, decodes)


def pressed(
    engine: WorkerProfile, work: Workload, decodes: N, kv_tokens: N, *, prefill: N, mixed: N, lent: N
) -> tuple[N, N]:
    """Return (prompt pressure, decode pressure) of one split or many.

    `decodes` and `kv_tokens` replace those of the work, since another split may change them.
    """
    speed = _speed(engine, work, decodes, kv_tokens, prefill=prefill, mixed=mixed, lent=lent)
    prompts = _prompt_pressure(work, speed)
    decodes, kv_tokens = _with_held(work, decodes, kv_tokens, speed)
    batch, kv = _decode_parts(engine, work, decodes, kv_tokens, mixed)
    return prompts, most(batch, kv)


def prompt_pressure(engine: WorkerProfile, work: Workload, decodes: N, kv_tokens: N, *, prefill: N, mixed: N) -> N:
    """Return the prompt pressure of a split in which all mixed workers have budgets."""
    return _prompt_pressure(work, _speed(engine, work, decodes, kv_tokens, prefill=prefill, mixed=mixed, lent=mixed))


def usual_link_ns(token_ns: Iterable[float]) -> float:
    """Return the usual time per token of workers' links; 0 if unknown. Links with 0 are unknown too."""
    # A slow link is a fault to repair, and workers that never decoded have not measured theirs.
    known = [each for each in token_ns if each > 0]
    return median_low(known) if known else 0.0


def most_prefill_by_link(engine: WorkerProfile, prompts: float, workers: float) -> float:
    """Return the largest number of prefill workers, out of `workers`, whose KV the links of the others can receive.

    `prompts` is the number of workers that prompts keep busy.
    """
    # A busy prefill worker fills one link by this much; a little less if prompts are long.
    filled = engine.chunk_speed * engine.kv_token_ns / LINK_FULL
    # If there are more prefill workers than prompts keep busy, only the number of links falls.
    return max(workers / (1 + filled), workers - prompts * filled)


def decode_parts(engine: WorkerProfile, work: Workload, mixed: float) -> tuple[float, float]:
    """Return the batch and KV pressures on this many workers.

    These are the sequences relative to the largest batches within TPOT, and their KV tokens relative to the space for
    them.
    """
    return _decode_parts(engine, work, work.decodes, work.kv_tokens, mixed)


def most_decodes(engine: WorkerProfile, tpot_ns: int, context_tokens: N) -> N:
    """Return how many sequences of `context_tokens` one worker decodes within the target; at least one.

    This is the closed form of the search in `largest_batch`.
    """
    if not tpot_ns:
        return context_tokens * 0 + engine.max_sequences
    model, step_ns, bound = engine.step_time, tpot_ns * (1 - IN_HAND), engine.max_sequences

    def fits(batch: N) -> bool | Truths:
        kv_ns = model.decode_kv_token_ns * (batch * context_tokens)
        return reading_ns(model, batch) + sequences_ns(model, batch) + kv_ns <= step_ns

    if model.saturating_sequences or model.graph_sequences:
        return _largest(fits, context_tokens * 0 + 1, bound)
    each_ns = model.decode_sequence_ns + model.decode_kv_token_ns * context_tokens
    left_ns = step_ns - model.decode_fixed_ns
    matrix_ns = left_ns - model.decode_matrix_ns
    few = least(over(left_ns, each_ns, inf if left_ns >= 0 else 0.0), MATRIX_ROWS - 1)
    many = over(matrix_ns, each_ns, inf if matrix_ns >= 0 else 0.0)
    guess = whole(most(least(where(many >= MATRIX_ROWS, many, few), bound), 1.0))
    # Rounding may have put the guess on the wrong side of the limit.
    lower = where(fits(guess), guess, guess - 1)
    return most(where((guess + 1 <= bound) & fits(guess + 1), guess + 1, lower), 1)


def _largest(fits: Callable[[N], bool | Truths], least_batch: N, bound: int) -> N:
    """Return the largest batch up to `bound` that fits, by bisection; `least_batch` if none does."""
    found = least_batch
    for power in reversed(range(bound.bit_length())):
        larger = found + (1 << power)
        found = where((larger <= bound) & fits(larger), larger, found)
    return found


def _alone_ns(engine: WorkerProfile, decodes: N, kv_tokens: N, mixed: N) -> tuple[N, N]:
    """Return (the time of the step, the part of it in which prompts can hide)."""
    model, each = engine.step_time, over(decodes, mixed, 0.0)
    kv_ns = over(model.decode_kv_token_ns * kv_tokens, mixed, 0.0)
    return reading_ns(model, each) + sequences_ns(model, each) + kv_ns, hiding_ns(model, each)


def lent_step_ns(decode_ns: N, tpot_ns: float, pressure: N) -> N:
    """Return the usual time of a step with decodes that take `decode_ns` alone, lengthened in proportion to the
    pressure of prompts.
    """
    return decode_ns + PROMPTS_PART * most(tpot_ns * (1 - IN_HAND) - decode_ns, 0.0) * least(pressure, 1.0)


def _ride(engine: WorkerProfile, tpot_ns: int, decodes: N, kv_tokens: N, mixed: N) -> N:
    if not tpot_ns:
        return where(mixed == 0, 0.0, 0.0 * mixed + 1.0)
    model, step_ns = engine.step_time, tpot_ns * (1 - IN_HAND)
    decode_ns, hidden_ns = _alone_ns(engine, decodes, kv_tokens, mixed)
    lent_ns = lent_step_ns(decode_ns, tpot_ns, 0.0 * decode_ns + 1.0)
    prefill_ns = most_prefill_ns(model, lent_ns, decode_ns, hidden_ns)
    tokens = _tokens(model, prefill_ns, engine.chunk_tokens)
    took_ns = mixed_ns(model, chunk_ns(model, tokens), decode_ns, hidden_ns)
    speed = least(over(tokens, took_ns, inf) / engine.chunk_speed, 1.0)
    speed = where(decode_ns >= step_ns, 0.0, speed)
    if model.prefill_floor_ns and not model.saturating_sequences:
        speed = where(prefill_ns < model.prefill_floor_ns, 0.0, speed)
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
    # Every prompt needs a decode worker in the end.
    nobody = inf if work.prompts else where(decodes == 0, 0.0, decodes * 0.0 + inf)
    return where(mixed == 0, nobody, batch), where(mixed == 0, nobody, where(decodes == 0, 0.0, kv))


def _tokens(model: StepTimeModel, prefill_ns: N, bound: int) -> N:
    # Squares are ignored, since they are the same wherever the prompt is computed.
    if not model.prefill_token_ns:
        return prefill_ns * 0.0 + bound
    return least(most(whole((prefill_ns - model.prefill_fixed_ns) / model.prefill_token_ns), 0.0), bound)
