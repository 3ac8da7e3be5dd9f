"""Phase shares of a vLLM server observed from outside, parsed from its /metrics.

Checked against vLLM 0.32.0. `num_requests_running` and `_waiting` change after a step, once finished requests have
left. `iteration_tokens_total` has one sample per output batch, so prompt chunks before the last have none.
`prompt_tokens_total` includes cached tokens; `prompt_tokens_by_source_total` separates them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from libs.contracts.errors import InvalidRequest
from libs.policy.observe import PhaseEstimator, Reading, interval

PREFIX: Final = "vllm:"
ENGINE: Final = "engine"
STEP_TOKENS: Final = "iteration_tokens_total"
COMPUTED_PROMPTS: Final = "prompt_tokens_by_source_total"
LOCAL_COMPUTE: Final = "local_compute"
# Names of the same histogram, the current one first; vLLM before 0.11 has the second.
TOKEN_GAPS: Final = ("inter_token_latency_seconds", "time_per_output_token_seconds")
PREFILL_TIME: Final = "request_prefill_time_seconds"
# The parser takes 0.1 ms a line, and there are 500, so other lines are dropped first.
_LINES: Final = tuple(
    PREFIX + name
    for name in (
        f"{STEP_TOKENS}_",
        COMPUTED_PROMPTS,
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
        *(f"{name}_{part}" for name in (*TOKEN_GAPS, PREFILL_TIME) for part in ("count", "sum")),
        "num_requests_running",
        "num_requests_waiting",
    )
)


def read_vllm(text: str, t_s: float) -> dict[str, Reading]:
    """Return a reading for each engine in an exposition, by its label ("0" where there is one).

    Raises:
        InvalidRequest: the text is no exposition, or not one of vLLM's.
    """
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(_LINES)) + "\n"
    values: defaultdict[str, dict[str, float]] = defaultdict(dict)
    bounds: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(wanted):
            for sample in family.samples:
                name, engine = sample.name.removeprefix(PREFIX), sample.labels.get(ENGINE, "0")
                if name == f"{STEP_TOKENS}_bucket":
                    bounds[engine].append((float(sample.labels["le"]), sample.value))
                elif name == COMPUTED_PROMPTS:
                    if sample.labels.get("source") == LOCAL_COMPUTE:
                        values[engine][name] = sample.value
                elif not name.endswith("_bucket"):
                    values[engine][name] = values[engine].get(name, 0.0) + sample.value
    except (ValueError, KeyError) as error:
        raise InvalidRequest(f"this is no Prometheus exposition: {error}") from None
    if not values:
        raise InvalidRequest("there is no metric of vLLM's (vllm:...) in this exposition")
    return {engine: _reading(found, sorted(bounds[engine]), t_s) for engine, found in values.items()}


def _reading(values: Mapping[str, float], bounds: list[tuple[float, float]], t_s: float) -> Reading:
    missing = [
        name
        for name in (f"{STEP_TOKENS}_count", "generation_tokens_total", "num_requests_running", "num_requests_waiting")
        if name not in values
    ]
    if missing:
        raise InvalidRequest(f"this vLLM exports no {PREFIX}{missing[0]}: too old, or its statistics are off")
    gaps = next((name for name in TOKEN_GAPS if f"{name}_count" in values), TOKEN_GAPS[0])
    return Reading(
        t_s=t_s,
        samples=values[f"{STEP_TOKENS}_count"],
        prompt_tokens=values.get(COMPUTED_PROMPTS, values.get("prompt_tokens_total", 0.0)),
        generated_tokens=values["generation_tokens_total"],
        first_tokens=values.get("time_to_first_token_seconds_count", 0.0),
        token_gaps=values.get(f"{gaps}_count", 0.0),
        token_gaps_s=values.get(f"{gaps}_sum", 0.0),
        prefills=values.get(f"{PREFILL_TIME}_count", 0.0),
        prefills_s=values.get(f"{PREFILL_TIME}_sum", 0.0),
        running=values["num_requests_running"],
        waiting=values["num_requests_waiting"],
        tokens_at_most=bounds or [(inf, values[f"{STEP_TOKENS}_count"])],
    )


MOST_ENGINES: Final = 64
"""The most data-parallel engines behind one exposition."""


@dataclass(slots=True)
class ObservedShares:
    """The estimated use of a stretch of time; `low` and `high` bound prefill's share."""

    t_s: float
    """The end of the stretch, in Unix seconds."""
    busy: float | None
    """Share of the time; None while nothing is known of the server's steps."""
    prefill: float | None
    """Share of busy time; None if idle or unknown."""
    low: float | None
    high: float | None


@dataclass(slots=True)
class _Engine:
    estimator: PhaseEstimator
    last: Reading


class ObservedServer:
    """The sum of a server's engines; each one learns separately, as the load of ranks may differ."""

    def __init__(self, read: Callable[[str, float], dict[str, Reading]] = read_vllm) -> None:
        self._read = read
        self._engines: dict[str, _Engine] = {}
        self._wall_s = 0.0
        self._busy_s = 0.0
        self._prefill_s = 0.0
        self._low_s = 0.0
        self._high_s = 0.0

    def scraped(self, text: str, t_s: float) -> None:
        """Process an exposition read at `t_s`; raise InvalidRequest and keep the state if it is invalid."""
        for name, reading in self._read(text, t_s).items():
            engine = self._engines.get(name)
            if engine is None:
                if len(self._engines) < MOST_ENGINES:
                    self._engines[name] = _Engine(PhaseEstimator(), reading)
                continue
            before, engine.last = engine.last, reading
            # A server that restarted begins again at 0; what it did meanwhile is not known.
            if reading.t_s <= before.t_s or reading.restarted_since(before):
                continue
            estimate = engine.estimator.observe(interval(before, reading))
            if estimate is None:
                continue
            self._wall_s += reading.t_s - before.t_s
            self._busy_s += estimate.busy_s
            self._prefill_s += estimate.prefill_s
            self._low_s += estimate.prefill_low_s
            self._high_s += estimate.prefill_high_s

    def shares(self, t_s: float) -> ObservedShares:
        """Return the shares since the last call."""
        if not self._wall_s:
            return ObservedShares(t_s, None, None, None, None)
        busy = ObservedShares(t_s, self._busy_s / self._wall_s, None, None, None)
        if self._busy_s:
            busy.prefill = self._prefill_s / self._busy_s
            busy.low = self._low_s / self._busy_s
            busy.high = self._high_s / self._busy_s
        self._wall_s = self._busy_s = self._prefill_s = self._low_s = self._high_s = 0.0
        return busy
