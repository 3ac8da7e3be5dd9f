"""The inputs of a capacity plan: a model's demand, its mix of requests and its workers, from recordings, files or
traces.
"""

from dataclasses import MISSING, asdict, dataclass, fields
from math import isfinite
from typing import Any, Final

import numpy as np

from libs.contracts.errors import InvalidRequest
from libs.demand.history import Mix, dispersion_of, hour_peaks
from libs.demand.report import DemandOutlook, ModelDemand
from libs.lab.traces.request import Trace
from libs.policy.capacity import Phase, WorkerKind
from libs.policy.forecast.history import SERIES, DemandHistory, Floats, SeriesName
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel

HOUR_S: Final = 3600.0
# Spikes within an hour are measured as means over this time. Shorter ones count as dispersion of the arrivals.
PEAK_S: Final = 600.0
MOST_PEAKS: Final = 1344
LONG_TRACE_S: Final = 4 * HOUR_S
MOST_LENGTHS: Final = 2000


@dataclass(frozen=True, slots=True)
class PlanInput:
    """The data from which the capacity of one model is planned."""

    model: str
    history: DemandHistory
    speed: float
    """The speed of the history's time relative to the clock."""
    mix: Mix
    peaks: Floats
    """The ratio of the busiest stretch to the mean of each past hour."""
    kind: WorkerKind | None
    """The kind of the model's workers; None if no worker has reported one."""
    there: dict[Phase, int]
    """The number of present workers by phase; empty if unknown."""
    lengths: tuple[tuple[int, int], ...] = ()
    """The prompt and output tokens of single requests; empty if only mean lengths are known."""
    known: bool = False
    """True to plan for the history itself, such as a trace, and not for a forecast from it."""
    outlook: DemandOutlook | None = None
    """A forecast that is consistent with those of other models. None to make one from the history alone."""


def input_of(
    demand: ModelDemand, kind: WorkerKind | None, there: dict[Phase, int], outlook: DemandOutlook | None = None
) -> PlanInput:
    """Return the input for recorded demand. Raise InvalidRequest if no request was recorded."""
    if demand.mix is None:
        raise InvalidRequest(f"no request for {demand.model} is known yet: there is nothing to plan for")
    step_s = demand.history.step_s
    counts, covered = demand.bins.sums(), demand.bins.covered
    peaks = hour_peaks(counts, covered, max(round(HOUR_S / step_s), 1), max(round(PEAK_S / step_s), 1))
    recent = peaks[-MOST_PEAKS:]
    return PlanInput(demand.model, demand.history, demand.speed, demand.mix, recent, kind, there, outlook=outlook)


def input_of_history(history: DemandHistory, model: str) -> PlanInput:
    """Return the input for demand from a file. Arrivals within a bin are assumed to be Poisson.

    Raise InvalidRequest if the demand has no request.
    """
    known = np.isfinite(history.requests) & np.isfinite(history.prefill) & np.isfinite(history.decode)
    requests = float(history.requests[known].sum()) if known.any() else 0.0
    if requests <= 0:
        raise InvalidRequest("it has no requests: there is nothing to plan for")
    prompts, outputs = float(history.prefill[known].sum()), float(history.decode[known].sum())
    per_hour = round(HOUR_S / history.step_s)
    peaks = np.ones(1)
    hours = len(history) // per_hour if per_hour > 1 else 0
    if hours:
        whole = (history.prefill + history.decode)[-hours * per_hour :].reshape(hours, per_hour)
        whole = whole[np.isfinite(whole).all(axis=1) & (whole.sum(axis=1) > 0)]
        peaks = whole.max(axis=1) / whole.mean(axis=1) if len(whole) else peaks
    mix = Mix(prompts / requests, outputs / requests, 0.0, 1.0)
    return PlanInput(model, history, 1.0, mix, peaks, None, {})


def input_of_trace(trace: Trace, model: str) -> PlanInput:
    """Return the input for a trace, with its own lengths and burstiness.

    The plan has one stretch for each hour of the trace, or shorter ones if the trace is short.
    """
    seconds = max(trace.duration_ns / 1e9, 1.0)
    bin_s = 60.0 if seconds >= 600 else max(seconds / 10, 1.0)
    places = np.array([int(each.arrival_ns / 1e9 / bin_s) for each in trace.requests])
    counts = np.zeros((int(places.max()) + 1, 7), np.int64)
    for column, values in enumerate(
        (
            np.ones(len(places)),
            np.ones(len(places)),
            [each.input_tokens for each in trace.requests],
            np.zeros(len(places)),
            [each.output_tokens for each in trace.requests],
            np.ones(len(places)),
        )
    ):
        np.add.at(counts[:, column], places, np.asarray(values, np.int64))
    covered = np.ones(len(counts), np.bool_)
    per = max(round((HOUR_S if seconds >= LONG_TRACE_S else PEAK_S) / bin_s), 1)
    whole = counts[: len(counts) // per * per].reshape(-1, per, 7).sum(axis=1) if len(counts) >= per else counts
    step_s = bin_s * per if len(counts) >= per else bin_s
    # A trace contains the output length of each request, so no mean over ended answers is needed.
    rates = whole / step_s
    history = DemandHistory(step_s, 0.0, rates[:, 0], rates[:, 2], rates[:, 4])
    every = max(len(trace.requests) // MOST_LENGTHS, 1)
    lengths = tuple((each.input_tokens, max(each.output_tokens, 1)) for each in trace.requests[::every])
    total = counts.sum(axis=0)
    mix = Mix(total[2] / total[0], total[4] / total[0], 0.0, dispersion_of(counts, covered))
    peaks = hour_peaks(counts, covered, per, max(round(PEAK_S / bin_s), 1))
    return PlanInput(model, history, 1.0, mix, peaks, None, {}, lengths, known=True)


def input_json(found: PlanInput) -> dict[str, Any]:
    """Encode an input for `input_from_json`. The lengths of single requests are omitted."""
    kind = found.kind
    return {
        "model": found.model,
        "start_s": found.history.start_s,
        "step_s": found.history.step_s,
        "speed": found.speed,
        **{name: [_plain(value) for value in found.history.series(name).tolist()] for name in SERIES},
        "notes": list(found.history.notes),
        "mix": asdict(found.mix),
        "peaks": [_plain(value) for value in found.peaks.tolist()],
        "workers": None
        if kind is None
        else {
            "step_time": asdict(kind.speed.step_time),
            "chunk_tokens": kind.speed.chunk_tokens,
            "gpus": kind.gpus,
            "max_sequences": kind.max_sequences,
            "kv_tokens": kind.kv_tokens,
            "encode_token_ns": kind.encode_token_ns,
        },
        "there": dict(found.there),
        "outlook": None if found.outlook is None else _outlook_json(found.outlook),
    }


def _outlook_json(outlook: DemandOutlook) -> dict[str, Any]:
    return {
        "start_s": outlook.start_s,
        "step_s": outlook.step_s,
        "quantiles": {name: outlook.quantiles[name].tolist() for name in SERIES},
        "little_history": outlook.little_history,
        "notes": list(outlook.notes),
        "hang": outlook.hang,
        "together": outlook.together,
    }


def _outlook_from_json(row: dict[str, Any]) -> DemandOutlook:
    quantiles: dict[SeriesName, Floats] = {name: np.array(row["quantiles"][name], np.float64) for name in SERIES}
    notes = tuple(row["notes"])
    return DemandOutlook(
        row["start_s"], row["step_s"], quantiles, row["little_history"], notes, row["hang"], row["together"],
        {name: [] for name in SERIES},
    )  # fmt: skip


def input_from_json(row: dict[str, Any]) -> PlanInput:
    """Decode an input that the metrics service has encoded."""
    series = [np.array([np.nan if v is None else v for v in row[name]], np.float64) for name in SERIES]
    requests, prefill, decode = series
    history = DemandHistory(row["step_s"], row["start_s"], requests, prefill, decode, tuple(row["notes"]))
    kind = None
    if row["workers"] is not None:
        reported = row["workers"]
        # Services of earlier versions omit the cost of large batches.
        defaults = {each.name: each.default for each in fields(StepTimeModel) if each.default is not MISSING}
        times = {each.name: (defaults | reported["step_time"])[each.name] for each in fields(StepTimeModel)}
        speed = Speed(StepTimeModel(**times), reported["chunk_tokens"], measured=True)
        encode_token_ns = reported.get("encode_token_ns", 0.0)
        kind = WorkerKind(speed, reported["gpus"], reported["max_sequences"], reported["kv_tokens"], encode_token_ns)
    peaks = np.array(row["peaks"], np.float64)
    outlook = None if row.get("outlook") is None else _outlook_from_json(row["outlook"])
    mix = Mix(**row["mix"])
    return PlanInput(row["model"], history, row["speed"], mix, peaks, kind, row["there"], outlook=outlook)


def _plain(value: float) -> float | None:
    return float(f"{value:.9g}") if isfinite(value) else None
