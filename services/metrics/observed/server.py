"""The conversion of one observed server's expositions to telemetry. Pure; time is passed in."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    ROLE_MIXED,
    ROLE_PREFILL,
    Assignment,
    Load,
    StepKindFit,
    StepTime,
)
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import PhaseEstimate, StepBatch
from libs.contracts.step_row import StepRow, step_columns
from libs.observe.demand import KnownWork, ServerCounter
from libs.observe.fleet import ObservedTarget
from libs.observe.server import EstimatedTime, ObservedServer
from libs.observe.vllm import ServerSample, VllmParser
from libs.policy.observe import StepCost
from libs.policy.observed_work import LONGEST_INTERVAL_S
from libs.telemetry.columns import LONGEST_NS, WINDOW_NS

ENGINE: Final = "vllm (observed)"
UNKNOWN_MODEL: Final = "unknown"
"""The name of a model whose server exports none."""
SECOND_NS: Final = 1_000_000_000
FULL: Final = 0.999
"""The busy share from which a stretch is recorded as one piece."""
LEAST_PROMPT_TOKENS: Final = 64.0
"""The prompt length assumed of requests that wait before any has been computed."""
FORGET: Final = 0.05
"""The weight of a scrape's prompts in the running mean of prompt lengths."""


class ServerState(StrEnum):
    UNKNOWN = "unknown"
    """The server has not been scraped yet."""
    LEARNING = "learning"
    """The server answers, but the cost of its steps is not known yet."""
    OBSERVED = "observed"
    EXACT = "exact"
    """The server reports its steps itself, and nothing is estimated."""
    AWAY = "away"
    FOREIGN = "foreign"
    """The server answers, but not with vLLM's metrics."""


@dataclass(frozen=True, slots=True)
class Scraped:
    batches: list[StepBatch]
    before: ServerSample | None
    """The sample that counters are compared with; None if there is none, as after a restart."""
    after: ServerSample
    demand: KnownWork | None
    """The demand since the last sample; None if unknown."""

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens computed between the samples."""
        old = {} if self.before is None else self.before.readings
        return round(
            sum(new.prompt_tokens - old[name].prompt_tokens for name, new in self.after.readings.items() if name in old)
        )


class ServerTelemetry:
    """The telemetry of one server, under one name through all its restarts."""

    def __init__(self, target: ObservedTarget, may_fit: Callable[[bool], bool] = lambda first: True) -> None:
        """Create the telemetry; `may_fit` is passed to `PhaseEstimator`."""
        self.target = target
        self.state = ServerState.UNKNOWN
        self.trouble = ""
        """The reason why nothing is known about the server now; empty otherwise."""
        self.since_ns = 0
        """The time of the last change of state."""
        self.restarts = 0
        self.model = target.model
        self._server = ObservedServer(may_fit)
        self._parser = VllmParser()
        self._counter = ServerCounter()
        self._last: ServerSample | None = None
        self._covered_to_ns = 0
        self._incarnation = self._sequence = 0
        self._step_time: tuple[StepCost, StepTime] | None = None
        """The latest cost of steps, and its form in telemetry."""
        self._prompt_tokens = 0.0
        """The running mean of computed tokens per prompt."""

    @property
    def waiting_tokens(self) -> int:
        """Estimated prompt tokens that wait at the server."""
        if self._last is None or self.target.role == "decode" or self.state is ServerState.AWAY:
            return 0
        waiting = sum(each.reading.waiting for each in self._last.engines.values())
        return round(waiting * max(self._prompt_tokens, LEAST_PROMPT_TOKENS))

    def failed(self, state: ServerState, trouble: str, now_ns: int) -> None:
        self._enter(state, now_ns)
        self.trouble = trouble

    def take(self, exposition: bytes, now_ns: int, *, exact: bool = False) -> Scraped:
        """Process an exposition read at `now_ns`. Times of an `exact` server are not estimated.

        Raise InvalidRequest and mark the server as foreign; earlier measurements stay.
        """
        try:
            sample = self._parser.parse(exposition, now_ns / SECOND_NS)
        except InvalidRequest as error:
            self.failed(ServerState.FOREIGN, error.message, now_ns)
            raise
        before, self._last = self._last, sample
        demand = self._counter.take(sample)
        time = self._server.take(sample.readings)
        from_ns, self._covered_to_ns = self._covered_to_ns, now_ns
        if before is None or time.restarted:
            self.restarts += before is not None
            self._incarnation, self._sequence = now_ns, 0
            before, time = None, EstimatedTime()
        if self.state is ServerState.EXACT and not exact:
            # Telemetry accepts estimates again only as those of a newer process than the reporting one.
            self._incarnation, self._sequence = now_ns, 0
        estimated = ServerState.OBSERVED if self._server.cost is not None else ServerState.LEARNING
        self._enter(ServerState.EXACT if exact else estimated, now_ns)
        self.trouble = ""
        self.model = self.target.model or sample.model or UNKNOWN_MODEL
        if before is not None:
            self._learn_prompts(before, sample)
        batches = [] if exact else self._batches(time, from_ns, now_ns, sample)
        return Scraped(batches, before, sample, demand)

    def farewell(self, now_ns: int) -> StepBatch | None:
        """Return the final batch of a server that is no longer observed; None if it never answered."""
        if self._last is None:
            return None
        batch = self._batches(EstimatedTime(), now_ns, now_ns, self._last)[-1]
        batch.last = True
        return batch

    def _enter(self, state: ServerState, now_ns: int) -> None:
        if state is not self.state:
            self.state, self.since_ns = state, now_ns

    def _learn_prompts(self, before: ServerSample, after: ServerSample) -> None:
        prompts = tokens = 0.0
        for name, engine in after.engines.items():
            if name in before.engines:
                prompts += engine.reading.first_tokens - before.engines[name].reading.first_tokens
                tokens += engine.reading.prompt_tokens - before.engines[name].reading.prompt_tokens
        if prompts >= 1:
            weight = FORGET if self._prompt_tokens else 1.0
            self._prompt_tokens += weight * (tokens / prompts - self._prompt_tokens)

    def _batches(self, time: EstimatedTime, from_ns: int, to_ns: int, sample: ServerSample) -> list[StepBatch]:
        """Return the batches of a stretch of time, each short enough to be processed together with many others."""
        # In a longer gap, the time at which counted work was done is unknown, so the gap is not covered. Time of a
        # server whose steps have an unknown cost is not covered either; it is never idle.
        known = bool(time.wall_s) and to_ns - from_ns <= LONGEST_INTERVAL_S * SECOND_NS
        edges = [*range(from_ns, to_ns, LONGEST_NS), to_ns] if known else [to_ns, to_ns]
        return [self._batch(time if known else EstimatedTime(), *edge, sample) for edge in pairwise(edges)]

    def _batch(self, time: EstimatedTime, from_ns: int, to_ns: int, sample: ServerSample) -> StepBatch:
        busy = min(time.busy_s / time.wall_s, 1.0) if time.wall_s else 0.0
        target, cost = self.target, self._server.cost
        self._sequence += 1
        return StepBatch(
            worker_id=target.name,
            incarnation=self._incarnation,
            sequence=self._sequence,
            node=target.node,
            gpus=target.gpus,
            engine=ENGINE,
            assignment=self._assignment(),
            covered_from_unix_ns=from_ns,
            covered_to_unix_ns=to_ns,
            steps=step_columns(StepRow(*each) for each in _stretches(from_ns, to_ns, busy)),
            load=self._load(sample),
            step_time=None if cost is None else self._step_time_message(cost),
            kv_blocks=sample.kv_blocks,
            block_size_tokens=sample.block_size_tokens,
            max_sequences=target.max_sequences,
            chunk_tokens=target.chunk_tokens,
            estimate=_estimate(time, to_ns - from_ns),
        )

    def _step_time_message(self, cost: StepCost) -> StepTime:
        if self._step_time is None or self._step_time[0] is not cost:
            self._step_time = cost, _step_time(cost)
        return self._step_time[1]

    def _assignment(self) -> Assignment:
        role = ROLE_PREFILL if self.target.role == "prefill" else ROLE_MIXED
        budget = self.target.chunk_tokens if self.target.role == "mixed" else 0
        return Assignment(model=self.model, role=role, budget_tokens=budget)

    def _load(self, sample: ServerSample) -> Load:
        engines = sample.engines.values()
        used = [each.kv_used for each in engines if each.kv_used is not None]
        free = 1.0 - min(sum(used) / len(used), 1.0) if used else 1.0
        return Load(
            running=round(sum(each.reading.running for each in engines)),
            waiting=round(sum(each.reading.waiting for each in engines)),
            waiting_prefill_tokens=self.waiting_tokens,
            free_kv_blocks=round(free * sample.kv_blocks),
            preemptions=round(sum(each.scalars.get("num_preemptions_total", 0.0) for each in engines)),
        )


def _stretches(from_ns: int, to_ns: int, busy: float) -> list[tuple[int, int]]:
    """Spread busy time evenly over windows, since its position within the interval is unknown."""
    if busy <= 0:
        return []
    if busy >= FULL:
        return [(from_ns, to_ns)] if to_ns > from_ns else []
    edges = [from_ns, *range((from_ns // WINDOW_NS + 1) * WINDOW_NS, to_ns, WINDOW_NS), to_ns]
    found = ((low, low + round((high - low) * busy)) for low, high in pairwise(edges))
    return [(low, high) for low, high in found if low < high]


def _estimate(time: EstimatedTime, length_ns: int) -> PhaseEstimate:
    scale = length_ns / time.wall_s if time.wall_s else 0.0
    busy_s, prefill_s, low_s, high_s = (
        round(scale * each) for each in (time.busy_s, time.prefill_s, time.low_s, time.high_s)
    )
    return PhaseEstimate(busy_ns=busy_s, prefill_ns=prefill_s, prefill_low_ns=low_s, prefill_high_ns=high_s)


def _step_time(cost: StepCost) -> StepTime:
    """Convert the fitted cost of steps to the form of a worker's own model."""
    return StepTime(
        prefill_floor_ns=cost.floor_s * SECOND_NS,
        prefill_fixed_ns=cost.base_s * SECOND_NS,
        prefill_token_ns=max(cost.prompt_token_s * SECOND_NS, 1.0),
        decode_fixed_ns=max(cost.base_s * SECOND_NS, 1.0),
        decode_sequence_ns=(cost.sequence_s + cost.further_sequence_s / 2) * SECOND_NS,
        interference=min(max(1.0 - cost.ride, 0.0), 1.0),
        prefill=StepKindFit(steps=1, error_p50=cost.residual, error_p90=2 * cost.residual),
        decode=StepKindFit(steps=1, error_p50=cost.residual, error_p90=2 * cost.residual),
        mixed=StepKindFit(steps=1, error_p50=cost.residual, error_p90=2 * cost.residual),
    )
