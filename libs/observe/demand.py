"""The demand of an observed fleet: servers' counts, folded into bins of time. Pure; time is passed in.

A bin is closed once every server that was present in it has been read beyond its end. A server that is away is waited
for up to `GIVE_UP_NS`. If its counters continued, their difference is spread over the time of its absence. Unknown time
never counts as time without demand: a model's bin is unknown if too much of it is missing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from libs.contracts.step_row import StepRow
from libs.demand.counts import Counts, DemandKey
from libs.demand.wire import BinDelta, Deltas
from libs.observe.vllm import ServerSample

SERVED: Final = "observed"
"""The placeholder for the class and tenant of observed demand, which servers do not report."""
GIVE_UP_NS: Final = 300_000_000_000
"""The time after which a server that is away counts as out of service, unless it is the last of its model."""
SETTLED_NS: Final = 5_000_000_000
"""The time after a bin's end within which late records of live servers arrive."""
KNOWN_SHARE: Final = 0.9
"""The share of its servers' time in a bin that must be known for a model's bin to stand for the whole of it."""
MAX_MODELS: Final = 64
"""The maximum number of models that are counted at a time; others are ignored."""
MAX_COUNT: Final = 2**40
"""The maximum that one stretch may add to a count; a larger value comes from a faulty server."""
MOST_BINS: Final = 64
"""The maximum number of bins that one call closes, and of bins that wait to be closed."""


class ServedWork(NamedTuple):
    """The work that a server counted over a stretch of time."""

    requests: int = 0
    """Requests that arrived, including waiting ones."""
    known_requests: int = 0
    """Requests with a first token, to which the tokens refer."""
    prompt_tokens: int = 0
    """The tokens of their prompts, whether computed or cached."""
    computed_tokens: int = 0
    output_tokens: int = 0
    ended: int = 0

    def plus(self, other: "ServedWork") -> "ServedWork":
        return ServedWork(*(mine + its for mine, its in zip(self, other, strict=True)))

    def part(self, over: int, whole: int) -> "ServedWork":
        """Return the part over/whole of each count, rounded down."""
        return ServedWork(*(each * over // whole for each in self))


class KnownWork(NamedTuple):
    """A stretch of time of which all work is known."""

    from_ns: int
    to_ns: int
    work: ServedWork


class ServerCounter:
    """The demand of one server, from its counters at each scrape."""

    def __init__(self) -> None:
        self._last: ServerSample | None = None
        self._arrived = 0.0

    def take(self, sample: ServerSample) -> KnownWork | None:
        """Return the work since the last sample; None if unknown, for example after a restart."""
        before, self._last = self._last, sample
        waiting = sum(each.reading.waiting for each in sample.engines.values())
        first = sum(each.reading.first_tokens for each in sample.engines.values())
        if before is None or _restarted(before, sample):
            self._arrived = first + waiting
            return None
        arrived = max(self._arrived, first + waiting)
        new, self._arrived = arrived - self._arrived, arrived
        known, prompt, computed, output, ended = (
            max(now - then, 0.0) for now, then in zip(_totals(sample), _totals(before), strict=True)
        )
        counts = (new, known, max(prompt, computed), computed, output, ended)
        work = ServedWork(*(round(min(each, MAX_COUNT)) for each in counts))
        return KnownWork(round(before.t_s * 1e9), round(sample.t_s * 1e9), work)


def _restarted(before: ServerSample, after: ServerSample) -> bool:
    if before.engines.keys() != after.engines.keys():
        return True
    return any(each.reading.restarted_since(before.engines[name].reading) for name, each in after.engines.items())


def _totals(sample: ServerSample) -> tuple[float, float, float, float, float]:
    """Return the numbers of first tokens, prompt tokens, computed prompt tokens, generated tokens and ended
    requests.
    """
    first = prompt = computed = output = ended = 0.0
    for each in sample.engines.values():
        first += each.reading.first_tokens
        prompt += each.scalars.get("prompt_tokens_total", 0.0)
        computed += each.reading.prompt_tokens
        output += each.reading.generated_tokens
        ended += each.scalars.get("request_success_total", 0.0)
    return first, prompt, computed, output, ended


class StepCounter:
    """The demand of one engine, derived from its steps.

    Steps do not name requests. A step below its budget of tokens finishes all of its prompts; a full one leaves one
    prompt for the next step.
    """

    def __init__(self) -> None:
        self._work = ServedWork()
        self._first = self._arrived = self._ended = 0

    def add(self, row: StepRow, role: str, budget_tokens: int) -> None:
        """Count a step; `budget_tokens` is the maximum for a step, 0 if unknown."""
        # A decode worker whose KV comes from elsewhere begins each request in one step, whatever its length.
        decodes = role == "decode"
        full = not decodes and 0 < budget_tokens <= row.prefill_tokens + row.decode_sequences
        first = max(row.prefill_sequences - full, 0)
        prompt = row.prefill_context_tokens if decodes else row.prefill_tokens
        computed = 0 if decodes else row.prefill_tokens
        self._first += first
        self._work = self._work.plus(ServedWork(0, first, prompt, computed, row.decode_sequences + first))

    def take(self, from_ns: int, to_ns: int, *, running: int, waiting: int) -> KnownWork:
        """Return the work counted since the last call."""
        arrived = max(self._arrived, self._first + waiting)
        ended = max(self._ended, self._first - running)
        work = self._work._replace(requests=arrived - self._arrived, ended=ended - self._ended)
        self._arrived, self._ended, self._work = arrived, ended, ServedWork()
        return KnownWork(from_ns, to_ns, ServedWork(*(min(each, MAX_COUNT) for each in work)))


@dataclass(slots=True)
class _CountedServer:
    since_ns: int
    model: str = ""
    role: str = "mixed"
    to_ns: int = 0
    """The end of the last known stretch; 0 before there is one."""
    gone_ns: int = 0
    """The end of the server's last known stretch once it has left the list; 0 while it is in the list."""


@dataclass(slots=True)
class _DemandBin:
    rows: dict[tuple[str, bool], ServedWork] = field(default_factory=dict)
    """The work by model, separately for prefill servers, whose requests continue on decode servers."""
    covered_ns: dict[str, int] = field(default_factory=dict)
    """The known time by server."""


@dataclass(slots=True)
class _Coverage:
    expected_ns: int = 0
    covered_ns: int = 0
    decodes: bool = False
    """True if a server that completes requests was present."""

    @property
    def is_known(self) -> bool:
        return self.expected_ns > 0 and self.covered_ns >= KNOWN_SHARE * self.expected_ns


class FleetDemand:
    """The demand of a fleet by model, in bins that begin after `now_ns`."""

    def __init__(self, bin_ns: int, now_ns: int) -> None:
        self._bin_ns = bin_ns
        self._next = now_ns // bin_ns + 1
        self._bins: dict[int, _DemandBin] = {}
        self._servers: dict[str, _CountedServer] = {}
        self._models: set[str] = set()

    def expect(self, servers: Mapping[str, str], now_ns: int) -> None:
        """Set the fleet's servers; the values are their models, empty if unknown."""
        for name, model in servers.items():
            known = self._servers.get(name)
            if known is None or known.gone_ns:
                known = self._servers[name] = _CountedServer(now_ns)
            known.model = known.model or model
        for name, each in list(self._servers.items()):
            if name in servers or each.gone_ns:
                continue
            each.gone_ns = each.to_ns
            if not each.to_ns:
                del self._servers[name]

    def enter(self, name: str, model: str, role: str, stretch: KnownWork) -> None:
        """Enter a stretch of a server's time, spread evenly over bins that are not closed."""
        from_ns, to_ns, work = stretch
        server = self._servers.get(name)
        if server is None:
            server = self._servers[name] = _CountedServer(from_ns)
        server.model, server.role, server.to_ns, server.gone_ns = model, role, max(server.to_ns, to_ns), 0
        length_ns = to_ns - from_ns
        if not 0 < length_ns <= GIVE_UP_NS or not self._is_listed(model):
            return
        done = ServedWork()
        for number in range(from_ns // self._bin_ns, (to_ns - 1) // self._bin_ns + 1):
            end_ns = min((number + 1) * self._bin_ns, to_ns)
            so_far = work.part(end_ns - from_ns, length_ns)
            part, done = ServedWork(*(each - its for each, its in zip(so_far, done, strict=True))), so_far
            if self._next <= number < self._next + MOST_BINS:
                self._add(number, name, (model, role == "prefill"), part, end_ns - max(number * self._bin_ns, from_ns))

    def take_deltas(self, now_ns: int) -> Deltas:
        """Return the bins that could be closed since the last call."""
        deltas: Deltas = {}
        for _ in range(MOST_BINS):
            coverage = self._coverage(self._next, now_ns)
            if coverage is None:
                break
            if (delta := self._delta(self._bins.pop(self._next, _DemandBin()), coverage)) is not None:
                deltas[self._next] = delta
            self._next += 1
        begin_ns = self._next * self._bin_ns
        for name in [name for name, each in self._servers.items() if each.gone_ns and each.gone_ns <= begin_ns]:
            del self._servers[name]
        self._models.intersection_update(each.model for each in self._servers.values())
        return deltas

    def _add(self, number: int, name: str, key: tuple[str, bool], work: ServedWork, covered_ns: int) -> None:
        found = self._bins.setdefault(number, _DemandBin())
        if any(work):
            found.rows[key] = found.rows.get(key, ServedWork()).plus(work)
        found.covered_ns[name] = found.covered_ns.get(name, 0) + covered_ns

    def _is_listed(self, model: str) -> bool:
        if model not in self._models and len(self._models) < MAX_MODELS:
            self._models.add(model)
        return model in self._models

    def _coverage(self, number: int, now_ns: int) -> dict[str, _Coverage] | None:
        """Return the known part of a bin for each model; None while the bin must stay open."""
        low_ns, high_ns = number * self._bin_ns, (number + 1) * self._bin_ns
        if now_ns < high_ns + SETTLED_NS:
            return None
        covered_ns = self._bins.get(number, _DemandBin()).covered_ns
        found: dict[str, _Coverage] = {}
        for name, each in self._servers.items():
            expected_ns = min(each.gone_ns or high_ns, high_ns) - max(each.since_ns, low_ns)
            if expected_ns <= 0:
                continue
            away = not each.gone_ns and each.to_ns < high_ns
            if away and now_ns - max(each.to_ns, each.since_ns) < GIVE_UP_NS:
                return None
            if not each.model or not self._is_listed(each.model):
                continue
            of_model = found.setdefault(each.model, _Coverage())
            of_model.decodes |= each.role != "prefill"
            if not away:
                of_model.expected_ns += expected_ns
                of_model.covered_ns += min(covered_ns.get(name, 0), expected_ns)
        return found

    def _delta(self, found: _DemandBin, coverage: Mapping[str, _Coverage]) -> BinDelta | None:
        known = {model: each for model, each in coverage.items() if each.is_known}
        if not known:
            return None
        rows = {
            DemandKey(model, SERVED, SERVED): counts
            for model, each in known.items()
            if any(counts := _counts(found.rows, model, each))
        }
        return BinDelta(rows, self._bin_ns, frozenset(coverage.keys() - known.keys()))


def _counts(rows: Mapping[tuple[str, bool], ServedWork], model: str, coverage: _Coverage) -> Counts:
    """Return a model's demand, scaled from the known part of the bin to all of it."""
    ends, begins = rows.get((model, False), ServedWork()), rows.get((model, True), ServedWork())
    # With split roles, each request passes a prefill server and a decode server, and counts at the decode server.
    work = ends if coverage.decodes else begins
    computed = ends.computed_tokens + begins.computed_tokens
    cached = max(work.prompt_tokens - computed, 0)
    counts = (work.requests, work.known_requests, work.prompt_tokens, cached, work.output_tokens, work.ended)
    return Counts(*(round(each * coverage.expected_ns / coverage.covered_ns) for each in counts))


def count_steps(counter: StepCounter, rows: Iterable[StepRow], role: str, budget_tokens: int) -> None:
    for row in rows:
        if row.end_unix_ns:
            counter.add(row, role, budget_tokens)
