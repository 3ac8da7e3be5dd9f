"""Robust, bounded fits of step-time models to measured steps, which never predict worse than the prior. Pure.

The model is linear once two regimes are known: which prompt chunks are below the floor, and which can hide in a decode
step. The fit therefore alternates. It derives the regimes from the last coefficients, fits new coefficients by robust
least squares of relative errors, then fits the interference. Mixed steps contribute to both parts, so pure ones are not
needed.

A prior learned on the same device still predicts step sizes that have not been measured since. Without this, a few
short prompts on a busy host would determine the prediction for the longest one.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from libs.policy.step_time import MATRIX_ROWS, StepTimeModel, StepWork

# The upper bound of step sizes, by powers of two. The least recently seen size is dropped.
MAX_CELLS: Final = 96
STEPS_PER_CELL: Final = 6
# The number of newer steps after which a step has half its weight.
HALF_LIFE_STEPS: Final = 4096
MAX_STEP_NS: Final = 600 * 1_000_000_000

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Measured steps as columns, each [steps] float64."""

    prefill_tokens: Floats
    squared: Floats
    batch: Floats
    kv_tokens: Floats
    duration_ns: Floats
    weight: Floats

    def __len__(self) -> int:
        return len(self.duration_ns)

    @property
    def has_prefill(self) -> NDArray[np.bool_]:
        """[steps] bool: the steps that compute prompt tokens."""
        return self.prefill_tokens > 0

    @property
    def has_decode(self) -> NDArray[np.bool_]:
        """[steps] bool: the steps that decode at least one sequence."""
        return self.batch > 0

    @property
    def kinds(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Three masks, [steps] bool each: pure prefill, pure decode, and mixed steps."""
        prefill, decode = self.has_prefill, self.has_decode
        return prefill & ~decode, decode & ~prefill, prefill & decode

    def plus(self, other: "Rows") -> "Rows":
        """Return these rows followed by the others."""
        return Rows(*(np.concatenate([getattr(self, each), getattr(other, each)]) for each in self.__slots__))

    def pick(self, chosen: NDArray[np.bool_]) -> "Rows":
        return Rows(
            self.prefill_tokens[chosen],
            self.squared[chosen],
            self.batch[chosen],
            self.kv_tokens[chosen],
            self.duration_ns[chosen],
            self.weight[chosen],
        )


class StepSamples:
    """The latest few steps of every size. A long run of equal steps does not displace steps of other sizes."""

    def __init__(self) -> None:
        self._cells: OrderedDict[tuple[int, ...], deque[tuple[int, StepWork, int]]] = OrderedDict()
        self._taken = 0

    def add(self, work: StepWork, duration_ns: int) -> bool:
        """Record a finished step. Ignore it and return False if it has no work or an impossible duration."""
        if not 0 < duration_ns <= MAX_STEP_NS or not (work.prefill_tokens or work.decode_sequences):
            return False
        self._taken += 1
        cell = (
            work.prefill_tokens.bit_length(),
            work.prefill_context_tokens.bit_length() // 2,
            work.decode_sequences.bit_length(),
            work.decode_kv_tokens.bit_length() // 2,
        )
        self._cells.setdefault(cell, deque(maxlen=STEPS_PER_CELL)).append((self._taken, work, duration_ns))
        self._cells.move_to_end(cell)
        if len(self._cells) > MAX_CELLS:
            self._cells.popitem(last=False)
        return True

    def rows(self) -> Rows:
        """Return all recorded steps in a fixed order."""
        table = np.array(list(self._entries()), dtype=np.float64).reshape(-1, 6)
        return Rows(*(table[:, index] for index in range(6)))

    def _entries(self) -> Iterator[tuple[float, ...]]:
        for cell in self._cells.values():
            for taken, work, duration_ns in cell:
                weight = 0.5 ** ((self._taken - taken) / HALF_LIFE_STEPS)
                yield (
                    work.prefill_tokens,
                    work.squared,
                    work.decode_sequences,
                    work.decode_kv_tokens,
                    duration_ns,
                    weight,
                )


# The upper bound of iterations of the active-set search, which converges in far fewer.
MAX_ACTIVE_SET_TURNS: Final = 64
# The number of standard deviations beyond which a residual has no weight. With normal noise, the weights cost 5 % of
# efficiency.
TUKEY: Final = 4.685
# The relative noise below which no residual is an outlier.
MIN_SCALE: Final = 0.002

# The number of rows from which a kind has its own scale.
MIN_KIND_ROWS: Final = 8


def nonnegative(gram: Floats, target: Floats) -> Floats:
    """Return the x >= 0 that minimises x·gram·x / 2 − target·x, for a positive definite gram (Lawson, Hanson)."""
    size = len(target)
    x, free = np.zeros(size), np.zeros(size, dtype=bool)
    for _ in range(MAX_ACTIVE_SET_TURNS):
        gradient = np.where(free, -np.inf, target - gram @ x)
        enters = int(gradient.argmax())
        if gradient[enters] <= 1e-12:
            break
        free[enters] = True
        while free.any():
            wanted = np.zeros(size)
            wanted[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
            blocked = free & (wanted <= 0)
            if not blocked.any():
                x = wanted
                break
            step = (x[blocked] / np.maximum(x[blocked] - wanted[blocked], 1e-300)).min()
            x = np.where(free, np.maximum(x + min(step, 1.0) * (wanted - x), 0.0), 0.0)
            free &= x > 1e-15
    return x


def with_prior(design: Floats, weight: Floats, prior: Floats, prior_rows: float) -> Floats:
    """Return coefficients >= 0 for design·x ≈ 1, which are close to `prior` where the data do not determine them.

    `design` is [rows, coefficients]. On each coefficient, the prior has the weight of `prior_rows` rows of that
    column's usual size. A column without data keeps its prior.
    """
    size = np.sqrt((weight[:, None] * design**2).sum(axis=0) / max(weight.sum(), 1e-300))
    used = size > 0
    found = prior.copy()
    if not used.any():
        return found
    scaled = design[:, used] / size[used]
    gram = (scaled * weight[:, None]).T @ scaled + prior_rows * np.eye(int(used.sum()))
    target = scaled.T @ weight + prior_rows * prior[used] * size[used]
    found[used] = nonnegative(gram, target) / size[used]
    return found


def robust_weights(residual: Floats, kinds: Sequence[NDArray[np.bool_]]) -> Floats:
    """Return [rows]: 1 for residuals within the noise, falling to 0 for outliers.

    The weight is Tukey's biweight, with a scale from the median. `kinds` are masks [rows] that together contain every
    row once. Each kind has its own scale. With a common scale, all rows of a rare and badly predicted kind could be
    outliers, and would never be fitted. A kind with too few rows takes the scale of all rows.
    """
    size = np.abs(residual)
    scale = np.full(len(size), np.median(size))
    for kind in kinds:
        if np.count_nonzero(kind) >= MIN_KIND_ROWS:
            scale[kind] = np.median(size[kind])
    inside = np.clip(1 - (size / (TUKEY * np.maximum(1.4826 * scale, MIN_SCALE))) ** 2, 0, None)
    return np.asarray(inside**2)


# A phase with fewer steps keeps the shape of its prior.
MIN_STEPS: Final = 16
# With this many pure steps of a phase, they determine its speed. With fewer, the prior does.
MIN_SCALED: Final = 4
# The weight of the prior in rows. It is small, so that the prior decides only where the data do not.
PRIOR_ROWS: Final = 0.05
MAX_TURNS: Final = 12
# A quantile of prefill durations, and of their ratio to a line. Nearly all steps lie above it.
LOW_QUANTILE: Final = 0.1
# The quantiles for the line, one for each start. With a high floor, only the few largest steps lie on the line.
LINE_QUANTILES: Final = (LOW_QUANTILE, 0.02)
# The upper bound of a coefficient's prediction for the largest work seen, relative to the longest step.
MAX_FACTOR: Final = 1e4
# The upper bound of a relative error, so that outliers do not decide between two models.
LOSS_CAP: Final = 1.0
# The loss on large batches up to which a profile's values are trusted.
GOOD_LOSS: Final = 0.03

# The sizes of the steps that represent an earlier model.
REMEMBERED_TOKENS: Final = tuple(2**power for power in range(4, 15))
REMEMBERED_BATCHES: Final = (1, 4, 16, 64, 256)
REMEMBERED_CONTEXTS: Final = (128, 1_024, 8_192)
REMEMBERED_WEIGHT: Final = 0.25
# A fit is valid up to this multiple of the sizes seen, so no steps of these sizes are remembered.
REACH: Final = 2.0

COEFFICIENTS: Final = (
    "prefill_floor_ns",
    "prefill_fixed_ns",
    "prefill_token_ns",
    "prefill_token_squared_ns",
    "decode_fixed_ns",
    "decode_matrix_ns",
    "decode_sequence_ns",
    "decode_kv_token_ns",
    "decode_wide_ns",
    "graph_exit_ns",
)
_PREFILL = slice(0, 4)
_DECODE = slice(4, 10)
_READING = slice(4, 6)


class Sizes(NamedTuple):
    """The batches at which a model's costs change. They come from the prior, and a fit keeps both or neither."""

    saturating: int
    graph: int

    @classmethod
    def of(cls, model: StepTimeModel) -> Self:
        return cls(model.saturating_sequences, model.graph_sequences)


def predict(model: StepTimeModel, rows: Rows) -> Floats:
    """Return [steps] ns: the model's prediction for each row."""
    vector, sizes = _vector(model), Sizes.of(model)
    prefill, decode = _parts(vector, rows, sizes)
    whole = prefill + decode - (1 - model.interference) * _shared(vector, rows, sizes)
    return np.maximum(whole, vector[0] * rows.has_prefill) if sizes.saturating else whole


def loss(model: StepTimeModel, rows: Rows) -> float:
    """Return the weighted mean of the relative errors, each at most 1; 0 without rows."""
    if not len(rows):
        return 0.0
    error = np.minimum(np.abs(predict(model, rows) / rows.duration_ns - 1), LOSS_CAP)
    return float(np.average(error, weights=rows.weight))


def remembered_steps(model: StepTimeModel, *, prefill: bool, decode: bool) -> Rows:
    """Return pure steps of many sizes as the model predicts them, for the phases that it has learned."""
    tokens = np.array(REMEMBERED_TOKENS if prefill else (), dtype=np.float64)
    sizes = [(batch, batch * each) for batch in REMEMBERED_BATCHES for each in REMEMBERED_CONTEXTS] if decode else []
    batch, kv_tokens = np.array(sizes, dtype=np.float64).reshape(-1, 2).T
    none, nothing = np.zeros(len(batch)), np.zeros(len(tokens))
    weight = np.full(len(tokens) + len(batch), REMEMBERED_WEIGHT)
    rows = Rows(
        prefill_tokens=np.concatenate([tokens, none]),
        squared=np.concatenate([tokens**2, none]),
        batch=np.concatenate([nothing, batch]),
        kv_tokens=np.concatenate([nothing, kv_tokens]),
        duration_ns=np.zeros(len(weight)),
        weight=weight,
    )
    rows = replace(rows, duration_ns=predict(model, rows))
    return rows.pick(rows.duration_ns > 0)  # a simulated device may take no time


NOTHING: Final = Rows(*(np.zeros(0) for _ in range(6)))


def fit_steps(prior: StepTimeModel, rows: Rows, remembered: Rows = NOTHING) -> StepTimeModel:
    """Return a model fitted to these steps, or the prior if there are too few or it predicts held-out steps better.

    `remembered` are the `remembered_steps` of a prior learned on the same device. They are used for sizes without a
    measured step. A prior without them is a guess, and a few steps then correct it for all sizes.

    A prior's large batches are dropped if at least `MIN_STEPS` steps of such a size are predicted better without them.
    """
    found = _fit_sizes(prior, rows, remembered)
    large = rows.pick(rows.batch > prior.saturating_sequences)
    if not prior.saturating_sequences or len(large) < MIN_STEPS or loss(found, large) <= GOOD_LOSS:
        return found
    start = prior.without_large_batches()
    # One descent takes a small part of a fit's time, and its result is close to that of the fit.
    unseen = _unseen(remembered, enough := _enough(rows))
    trial = _descend(_scaled(start, enough, unseen), enough, unseen)
    if loss(trial, large) >= loss(found, large):
        return found
    plain = _fit_sizes(start, rows, remembered)
    # The plain model has fewer coefficients, so it fits the steps better only if they contradict the prior's batches.
    better = loss(plain, large) < loss(found, large) and loss(plain, rows) < loss(found, rows)
    return plain if better else found


def _fit_sizes(prior: StepTimeModel, rows: Rows, remembered: Rows) -> StepTimeModel:
    """Fit the coefficients. The batches at which costs change remain those of the prior."""
    for own, other, known in (
        (rows.has_prefill, rows.has_decode, remembered.has_prefill),
        (rows.has_decode, rows.has_prefill, remembered.has_decode),
    ):
        pure = own & ~other
        if own.sum() < MIN_STEPS and pure.sum() >= MIN_SCALED and not known.any():
            scaled = _if_better(_scaled, prior, rows.pick(pure))
            prior = scaled if loss(scaled, rows) <= loss(prior, rows) else prior
    rows = _enough(rows)
    return _if_better(partial(_fit, remembered=_unseen(remembered, rows)), prior, rows)


def _unseen(remembered: Rows, rows: Rows) -> Rows:
    """Return the remembered steps of sizes that the rows do not reach."""
    seen = np.ones(len(remembered), dtype=bool)
    for has, sizes in (("has_prefill", ("prefill_tokens", "squared")), ("has_decode", ("batch", "kv_tokens"))):
        own, known = getattr(rows, has), getattr(remembered, has)
        for size in sizes if own.any() else ():
            reach = REACH**2 if size == "squared" else REACH
            measured, kept = getattr(rows, size)[own], getattr(remembered, size)
            seen &= ~known | ((kept >= measured.min() / reach) & (kept <= measured.max() * reach))
    return remembered.pick(~seen)


def _if_better(fit: Callable[[StepTimeModel, Rows], StepTimeModel], prior: StepTimeModel, rows: Rows) -> StepTimeModel:
    """Return the result of `fit`, or the prior if that predicts one half of the rows better than a fit to the other."""
    if not len(rows):
        return prior
    odd = np.arange(len(rows)) % 2 == 1
    trial, unseen = fit(prior, rows.pick(~odd)), rows.pick(odd)
    if loss(trial, unseen) > loss(prior, unseen):
        return prior
    fitted = fit(prior, rows)
    return fitted if loss(fitted, rows) <= loss(prior, rows) else prior


def _enough(rows: Rows) -> Rows:
    """Return the rows without the steps of phases with too few of them."""
    keep = np.ones(len(rows), dtype=bool)
    for has in (rows.has_prefill, rows.has_decode):
        if has.sum() < MIN_STEPS:
            keep &= ~has
    return rows.pick(keep)


def _fit(prior: StepTimeModel, rows: Rows, remembered: Rows) -> StepTimeModel:
    """Return the best of the local optima from a few starts. There are several optima because of the regimes."""
    scaled = _scaled(prior, rows, remembered)
    starts = [scaled]
    if (pure := rows.has_prefill & ~rows.has_decode).sum() >= MIN_STEPS:
        starts += [_from_below(prior, scaled, rows.pick(pure), quantile) for quantile in LINE_QUANTILES]
    if (rows.has_prefill & rows.has_decode).any():
        starts = [replace(start, interference=share) for start in starts for share in (0.2, 0.8)]
    every = rows.plus(remembered)
    return min((_descend(start, rows, remembered) for start in starts), key=lambda model: loss(model, every))


def _from_below(prior: StepTimeModel, start: StepTimeModel, rows: Rows, line_quantile: float) -> StepTimeModel:
    """Return a start whose floor and line both lie below the prefill steps, as on any real device."""
    floor_ns = float(np.quantile(rows.duration_ns, LOW_QUANTILE))
    line_ns = np.maximum(
        prior.prefill_token_ns * rows.prefill_tokens + prior.prefill_token_squared_ns * rows.squared, 1
    )
    factor = float(np.quantile(rows.duration_ns / line_ns, line_quantile))
    return replace(
        start,
        prefill_floor_ns=floor_ns,
        prefill_fixed_ns=0.0,
        prefill_token_ns=prior.prefill_token_ns * factor,
        prefill_token_squared_ns=prior.prefill_token_squared_ns * factor,
    )


def _descend(start: StepTimeModel, measured: Rows, remembered: Rows) -> StepTimeModel:
    first, sizes = _vector(start), Sizes.of(start)
    vector, interference = first.copy(), start.interference
    rows, kinds = measured.plus(remembered), measured.kinds
    for _ in range(MAX_TURNS):
        design = _design(vector, interference, rows, sizes)
        weight = rows.weight.copy()  # remembered steps are never outliers
        weight[: len(measured)] *= robust_weights((design @ vector - 1)[: len(measured)], kinds)
        found = np.minimum(with_prior(design, weight, first, PRIOR_ROWS), _bounds(rows, sizes))
        interference = _interference(found, rows, weight, start.interference, sizes)
        settled = np.allclose(found, vector, rtol=1e-3)
        vector = found
        if settled:
            break
    return _with(start, vector, interference)


def _with(model: StepTimeModel, vector: Floats, interference: float) -> StepTimeModel:
    times: dict[str, Any] = dict(zip(COEFFICIENTS, map(float, vector), strict=True))
    return replace(model, interference=interference, **times)


def _vector(model: StepTimeModel) -> Floats:
    """Return [10]: the coefficients in the order of `COEFFICIENTS`."""
    return np.array([getattr(model, name) for name in COEFFICIENTS])


def _linear(rows: Rows, sizes: Sizes) -> tuple[Floats, Floats]:
    """Return ([steps, 3], [steps, 6]): the factors of the coefficients of prefill (above its floor) and of decode."""
    nothing = np.zeros(len(rows))
    wide = np.maximum(rows.batch - sizes.saturating, 0) if sizes.saturating else nothing
    left = rows.batch > sizes.graph if sizes.graph else nothing
    prefill = np.stack([np.ones(len(rows)), rows.prefill_tokens, rows.squared], axis=1)
    decode = np.stack([np.ones(len(rows)), rows.batch >= MATRIX_ROWS, rows.batch, rows.kv_tokens, wide, left], axis=1)
    return prefill * rows.has_prefill[:, None], decode * rows.has_decode[:, None]


def _parts(vector: Floats, rows: Rows, sizes: Sizes) -> tuple[Floats, Floats]:
    """Return ([steps], [steps]) ns: prompt chunks and decodes.

    With known `sizes.saturating`, chunks have no own floor.
    """
    prefill, decode = _linear(rows, sizes)
    floor_ns = 0.0 if sizes.saturating else vector[0]
    return np.maximum(prefill @ vector[1:4], floor_ns * rows.has_prefill), decode @ vector[_DECODE]


def _design(vector: Floats, interference: float, rows: Rows, sizes: Sizes) -> Floats:
    """Return [steps, 10]: the model linearised around `vector`, each row divided by its duration."""
    linear, decode = _linear(rows, sizes)
    prefill_ns, decode_ns = _parts(vector, rows, sizes)
    shared_ns = _shared(vector, rows, sizes)
    above_ns = prefill_ns + decode_ns - (1 - interference) * shared_ns if sizes.saturating else linear @ vector[1:4]
    on_floor = rows.has_prefill & (above_ns < vector[0])
    prefill = np.where(on_floor[:, None], np.array([1.0, 0, 0, 0]), np.pad(linear, ((0, 0), (1, 0))))
    mixed = rows.has_prefill & rows.has_decode
    if sizes.saturating:  # decodes do not lengthen a step on its floor either
        decode[on_floor] = 0.0
        mixed &= ~on_floor
    hiding_ns = _hiding(vector, rows, sizes)
    all_hides = mixed & (prefill_ns < hiding_ns)  # the whole chunk hides behind the reading of weights
    prefill[all_hides] *= interference
    rest = mixed & ~all_hides
    decode[rest, :2] *= 1 - (1 - interference) * _room(rows, sizes)[rest, None]
    return np.asarray(np.hstack([prefill, decode]) / rows.duration_ns[:, None])


def _scaled(prior: StepTimeModel, rows: Rows, remembered: Rows = NOTHING) -> StepTimeModel:
    """Scale each phase without remembered steps to the speed of its pure steps.

    Without pure steps, the phase is scaled by its mixed steps.
    """
    vector = _vector(prior)
    for part, own, other, known in (
        (_PREFILL, rows.has_prefill, rows.has_decode, remembered.has_prefill),
        (_DECODE, rows.has_decode, rows.has_prefill, remembered.has_decode),
    ):
        if known.any():
            continue
        chosen = rows.pick(own & ~other if (own & ~other).any() else own)
        expected = predict(prior, chosen)
        if (expected > 0).any():
            vector[part] *= np.median((chosen.duration_ns / np.maximum(expected, 1.0))[expected > 0])
    return _with(prior, vector, prior.interference)


def _bounds(rows: Rows, sizes: Sizes) -> Floats:
    linear, decode = _linear(rows, sizes)
    largest = np.concatenate([[1.0], np.maximum(linear.max(axis=0), 1.0), np.maximum(decode.max(axis=0), 1.0)])
    return np.asarray(MAX_FACTOR * rows.duration_ns.max() / largest)


def _shared(vector: Floats, rows: Rows, sizes: Sizes) -> Floats:
    """Return [steps] ns: the time that a mixed step could hide; 0 for pure steps."""
    return np.asarray(np.minimum(_parts(vector, rows, sizes)[0], _hiding(vector, rows, sizes)))


def _hiding(vector: Floats, rows: Rows, sizes: Sizes) -> Floats:
    """Return [steps] ns: the fixed part of decode in which prompt chunks can hide."""
    return np.asarray((_linear(rows, sizes)[1][:, :2] @ vector[_READING]) * _room(rows, sizes))


def _room(rows: Rows, sizes: Sizes) -> Floats:
    """Return [steps]: the fraction of decode's fixed part in which prompt chunks can hide."""
    return np.maximum(1 - rows.batch / sizes.saturating, 0.0) if sizes.saturating else np.ones(len(rows))


def _interference(vector: Floats, rows: Rows, weight: Floats, prior: float, sizes: Sizes) -> float:
    """Fit the interference, 0..1, by least squares of the time that mixed steps save against the sum of their parts."""
    shared = _shared(vector, rows, sizes) / rows.duration_ns
    saved = sum(_parts(vector, rows, sizes)) / rows.duration_ns - 1
    if sizes.saturating:  # a step on its floor does not depend on the interference
        whole_ns = sum(_parts(vector, rows, sizes)) - (1 - prior) * _shared(vector, rows, sizes)
        weight = weight * ~(rows.has_prefill & (whole_ns < vector[0]))
    usual = float(np.average(shared**2, weights=rows.weight)) * PRIOR_ROWS
    information = float((weight * shared**2).sum()) + usual
    if information <= 0:
        return prior
    hidden = ((weight * shared * saved).sum() + usual * (1 - prior)) / information
    return float(np.clip(1 - hidden, 0.0, 1.0))
