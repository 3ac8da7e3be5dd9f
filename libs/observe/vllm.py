"""A parser of vLLM's /metrics that remembers the positions of known lines, since they seldom move.

Checked against vLLM 0.32.0. `num_requests_running` and `_waiting` change after a step, once finished requests have
left. `iteration_tokens_total` has one sample per output batch, so prompt chunks before the last have none.
`prompt_tokens_total` includes cached tokens; `prompt_tokens_by_source_total` separates them.
"""

import re
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.policy.newest import put_newest
from libs.policy.observed_work import Reading

PREFIX: Final = b"vllm:"
ENGINE: Final = "engine"
STEP_TOKENS: Final = "iteration_tokens_total"
COMPUTED_PROMPTS: Final = "prompt_tokens_by_source_total"
LOCAL_COMPUTE: Final = "local_compute"
# Names of the same histogram, the current one first; vLLM before 0.11 has the second.
TOKEN_GAPS: Final = ("inter_token_latency_seconds", "time_per_output_token_seconds")
PREFILL_TIME: Final = "request_prefill_time_seconds"
TTFT: Final = "time_to_first_token_seconds"
TPOT: Final = "request_time_per_output_token_seconds"
QUEUE_TIME: Final = "request_queue_time_seconds"
KV_USED: Final = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
CACHE_CONFIG: Final = "cache_config_info"
HISTOGRAMS: Final = (STEP_TOKENS, TTFT, TPOT, QUEUE_TIME)
SCALARS: Final = frozenset(
    {
        f"{STEP_TOKENS}_count",
        COMPUTED_PROMPTS,
        "prompt_tokens_total",
        "generation_tokens_total",
        f"{TTFT}_count",
        *(f"{name}_{part}" for name in (*TOKEN_GAPS, PREFILL_TIME) for part in ("count", "sum")),
        "num_requests_running",
        "num_requests_waiting",
        "request_success_total",
        "num_preemptions_total",
        *KV_USED,
        CACHE_CONFIG,
    }
)
_BUCKETS: Final = {f"{name}_bucket": name for name in HISTOGRAMS}
_LABEL: Final = re.compile(rb'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)",?')
MOST_ENGINES: Final = 64
"""The maximum number of data-parallel engines behind one exposition."""
MOST_LINES: Final = 4_096
"""The maximum number of known lines of one exposition; vLLM has about a hundred per engine."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram's counts so far. As pairs of objects they would take eight times the memory."""

    bounds: Sequence[float]
    """The upper bounds in ascending order, which servers of one layout share."""
    counts: "array[float]"


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One engine's counters and gauges at one time."""

    reading: Reading
    scalars: Mapping[str, float]
    """The sums of all lines of a name, without vLLM's prefix."""
    histograms: Mapping[str, Buckets]

    @property
    def kv_used(self) -> float | None:
        return next((self.scalars[name] for name in KV_USED if name in self.scalars), None)


@dataclass(frozen=True, slots=True)
class ServerSample:
    """The figures of all engines behind one exposition, at one scrape."""

    t_s: float
    engines: Mapping[str, EngineSample]
    """Samples by the label `engine`; "0" stands for a missing label."""
    model: str
    block_size_tokens: int
    kv_blocks: int
    """KV blocks of all engines; 0 if unknown."""

    @property
    def readings(self) -> dict[str, Reading]:
        return {name: each.reading for name, each in self.engines.items()}


@dataclass(slots=True)
class _Layout:
    """The positions of known lines in the last exposition."""

    lines: int = 0
    numbers: list[int] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    """The bytes of each of these lines before its value."""
    lengths: list[int] = field(default_factory=list)
    scalars: list[tuple[int, str, str]] = field(default_factory=list)
    """The index in `numbers`, the engine and the name of each scalar."""
    buckets: list[tuple[str, str, list[float], list[int]]] = field(default_factory=list)
    """The engine, name, upper bounds in ascending order, and an index into `numbers` for each bound."""
    model: str = ""
    block_size_tokens: int = 0
    kv_blocks: int = 0


class VllmParser:
    """A parser of one server's expositions that remembers their layout."""

    def __init__(self) -> None:
        self._layout = _Layout()

    def parse(self, text: bytes, t_s: float) -> ServerSample:
        """Return the sample of an exposition; raise InvalidRequest if it is not one of vLLM's."""
        lines = text.split(b"\n")
        values = self._values(lines)
        if values is None:
            self._layout = _shared(_learn(lines))
            values = self._values(lines)
            if values is None:
                raise InvalidRequest("this is not a Prometheus exposition: a value is not a number")
        return _sample(self._layout, values, t_s)

    def _values(self, lines: Sequence[bytes]) -> list[float] | None:
        """Return the values of the known lines; None if they have moved or are not numbers."""
        layout = self._layout
        if len(lines) != layout.lines:
            return None
        found = [lines[number] for number in layout.numbers]
        if not all(map(bytes.startswith, found, layout.heads)):
            return None
        try:
            values = [float(line[length:]) for line, length in zip(found, layout.lengths, strict=True)]
        except ValueError:
            return None
        return values if min(values) >= 0.0 and max(values) < inf else None


def _learn(lines: Sequence[bytes]) -> _Layout:
    layout = _Layout(lines=len(lines))
    bounds: defaultdict[tuple[str, str], dict[float, int]] = defaultdict(dict)
    engines: set[str] = set()
    for number, line in enumerate(lines):
        if not line.startswith(PREFIX):
            continue
        name, labels, length = _head(line)
        histogram = _BUCKETS.get(name)
        if histogram is None and name not in SCALARS:
            continue
        engine = labels.get(ENGINE, "0")
        if engine not in engines and len(engines) >= MOST_ENGINES:
            continue
        if name == COMPUTED_PROMPTS and labels.get("source") != LOCAL_COMPUTE:
            continue
        layout.model = layout.model or labels.get("model_name", "")
        if name == CACHE_CONFIG:
            layout.block_size_tokens = _count(labels.get("block_size", ""))
            layout.kv_blocks += _count(labels.get("num_gpu_blocks", ""))
            continue
        engines.add(engine)
        if len(layout.numbers) >= MOST_LINES:
            raise InvalidRequest(f"this exposition has over {MOST_LINES} known lines")
        if histogram is not None:
            bounds[engine, histogram].setdefault(_bound(labels), len(layout.numbers))
        else:
            layout.scalars.append((len(layout.numbers), engine, name))
        layout.numbers.append(number)
        layout.heads.append(line[:length])
        layout.lengths.append(length)
    if not layout.numbers:
        raise InvalidRequest("there is no metric of vLLM's (vllm:...) in this exposition")
    layout.buckets = [(*key, sorted(found), [found[bound] for bound in sorted(found)]) for key, found in bounds.items()]
    return layout


MOST_LAYOUTS: Final = 64
_LAYOUTS: Final[OrderedDict[tuple[object, ...], _Layout]] = OrderedDict()
"""Layouts by their content. Servers of one model share one, of 40 kB."""


def _shared(layout: _Layout) -> _Layout:
    key = (layout.lines, layout.kv_blocks, layout.block_size_tokens, *layout.numbers, *layout.heads)
    if (known := _LAYOUTS.get(key)) is not None:
        return known
    put_newest(_LAYOUTS, key, layout, MOST_LAYOUTS)
    return layout


def _head(line: bytes) -> tuple[str, dict[str, str], int]:
    """Return a line's name without prefix, its labels, and the length of the text before its value."""
    opened, closed = line.find(b"{"), line.rfind(b"}")
    if opened < 0:
        name, space, _ = line.partition(b" ")
        if not space:
            raise InvalidRequest("this is not a Prometheus exposition: a line has no value")
        return name[len(PREFIX) :].decode(errors="replace"), {}, len(name) + 1
    if closed < opened or not line[closed + 1 :].strip():
        raise InvalidRequest("this is not a Prometheus exposition: a line has no value, or its labels have no end")
    labels = {
        name.decode(): value.decode(errors="replace") for name, value in _LABEL.findall(line[opened + 1 : closed])
    }
    return line[len(PREFIX) : opened].decode(errors="replace"), labels, closed + 1


def _bound(labels: Mapping[str, str]) -> float:
    try:
        return float(labels["le"])
    except (KeyError, ValueError):
        raise InvalidRequest("this is not a Prometheus exposition: a bucket has no bound") from None


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _sample(layout: _Layout, values: Sequence[float], t_s: float) -> ServerSample:
    scalars: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for place, engine, name in layout.scalars:
        own = scalars[engine]
        own[name] = own.get(name, 0.0) + values[place]
    histograms: defaultdict[str, dict[str, Buckets]] = defaultdict(dict)
    for engine, name, bounds, places in layout.buckets:
        histograms[engine][name] = Buckets(bounds, array("d", [values[each] for each in places]))
    engines = {
        engine: EngineSample(_reading(own, histograms[engine].get(STEP_TOKENS), t_s), own, histograms[engine])
        for engine, own in scalars.items()
    }
    return ServerSample(t_s, engines, layout.model, layout.block_size_tokens, layout.kv_blocks)


def _reading(values: Mapping[str, float], tokens: Buckets | None, t_s: float) -> Reading:
    missing = [
        name
        for name in (f"{STEP_TOKENS}_count", "generation_tokens_total", "num_requests_running", "num_requests_waiting")
        if name not in values
    ]
    if missing:
        raise InvalidRequest(f"this vLLM exports no vllm:{missing[0]}: too old, or its statistics are off")
    gaps = next((name for name in TOKEN_GAPS if f"{name}_count" in values), TOKEN_GAPS[0])
    return Reading(
        t_s=t_s,
        samples=values[f"{STEP_TOKENS}_count"],
        prompt_tokens=values.get(COMPUTED_PROMPTS, values.get("prompt_tokens_total", 0.0)),
        generated_tokens=values["generation_tokens_total"],
        first_tokens=values.get(f"{TTFT}_count", 0.0),
        token_gaps=values.get(f"{gaps}_count", 0.0),
        token_gaps_s=values.get(f"{gaps}_sum", 0.0),
        prefills=values.get(f"{PREFILL_TIME}_count", 0.0),
        prefills_s=values.get(f"{PREFILL_TIME}_sum", 0.0),
        running=values["num_requests_running"],
        waiting=values["num_requests_waiting"],
        tokens_at_most=(
            [(inf, values[f"{STEP_TOKENS}_count"])]
            if tokens is None
            else tuple(zip(tokens.bounds, tokens.counts, strict=True))
        ),
    )
