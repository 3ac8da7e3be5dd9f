"""Choices whose prompts may have killed a worker.

They are isolated from others, and cleared once they have passed the stage in which the worker died. They are ended if
more workers die.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import structlog
import xxhash
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.contracts.errors import PoisonRequest
from libs.dispatch.generation import Generation
from libs.policy.gateway.placement import Attempt, WorkerKey
from libs.policy.gateway.suspicion import (
    FRESH_TOKENS,
    MAX_LOST_WORKERS,
    FirstTries,
    HeldChoice,
    Key,
    Prompt,
    SuspectTrial,
    Suspicion,
    WorkStage,
)
from libs.policy.roles import Phase
from libs.runtime.clock import Clock

log = structlog.get_logger()

# The time for which a suspect waits for a worker without other suspects. After that it may use any worker.
APART_NS = 5_000_000_000
LOST = f"{MAX_LOST_WORKERS} workers were lost while they computed this prompt"


class BindingBatch(NamedTuple):
    """Waiting choices that are bound by one call of the router."""

    choices: Sequence[Generation]
    avoided: frozenset[str] = frozenset()
    """Workers to use only if no others have room."""
    barred: frozenset[str] = frozenset()
    """Workers that must not be used."""


class Suspects:
    """The suspects of one gateway. `Suspicion` makes the decisions about them."""

    def __init__(self, clock: Clock, memory_s: float, quiet: Callable[[Attempt], bool]) -> None:
        """Create the record.

        `quiet` returns whether the worker of an attempt may have died before it read the choice.
        """
        self._clock = clock
        self._quiet = quiet
        self._suspicion = Suspicion(round(memory_s * 1e9))
        self._first_tries: FirstTries[Generation] = FirstTries()
        # In order of arrival.
        self._on_trial: dict[Generation, None] = {}
        self.found = 0
        """The number of prompts found to be poison."""
        self.refused = 0
        """The number of requests refused because their prompt is poison."""

    def __bool__(self) -> bool:
        """Return whether any choice is on trial."""
        return bool(self._on_trial)

    @property
    def remembered(self) -> int:
        return self._suspicion.poison(self._clock.now_ns())

    def admit(self, generations: Sequence[Generation]) -> None:
        """Admit the choices of one request. Raise PoisonRequest if one of its prompts is known to be poison."""
        prompts: set[Prompt] = set()
        now_ns = self._clock.now_ns()
        if self._suspicion:
            prompts = {_fingerprint(generation) for generation in generations}
            if any(self._suspicion.is_poison(prompt, now_ns) for prompt in prompts):
                self.refused += 1
                raise PoisonRequest(f"{LOST}, recently: it is not sent to other workers for now")
        for generation in generations:
            generation.siblings = generations
            if prompts:
                self._try(generation)
            if generation.prompt:  # sequences in the lab have a length but no tokens
                self._first_tries.came(generation, _key(generation), now_ns)

    def first_tries(self) -> Callable[[Generation], bool]:
        """Return a predicate for one round, which says whether a waiting choice may start beside others with its
        prompt.

        Choices on trial may always start, because other rules apply to them.
        """
        may_start = self._first_tries.round()
        return lambda generation: generation.trial is not None or may_start(generation)

    def bound(self, generation: Generation) -> None:
        self._first_tries.bound(generation)

    def waits(self, generation: Generation) -> None:
        """Record that a choice has been queued, initially or again."""
        self._first_tries.waits(generation)

    def computed(self, generation: Generation) -> None:
        if generation.prompt:
            self._first_tries.computed(_key(generation), self._clock.now_ns())

    def lost(self, worker: WorkerKey, attempts: Iterable[tuple[Generation, Attempt]]) -> None:
        """Suspect the attempts on a worker whose stream broke, probably because the worker died."""
        held = [(each, seen) for each, attempt in attempts if (seen := self._held(each, attempt)) is not None]
        self._suspicion.lost(worker, [seen for _, seen in held], self._clock.now_ns())
        for generation, _ in held:
            self._try(generation)
            for other in self._first_tries.waiting_with(generation):
                self._try(other)

    def died(self, worker: WorkerKey, live: Iterable[Generation]) -> list[Generation]:
        """Record that a worker whose stream broke cannot be reached. Return the choices that end because of it."""
        return self._condemned(self._suspicion.died(worker, self._clock.now_ns()), live)

    def overdue(self, live: Iterable[Generation]) -> list[Generation]:
        """Return the choices that end because their lost workers have not returned in time."""
        return self._condemned(self._suspicion.overdue(self._clock.now_ns()), live)

    def returned(self, worker: WorkerKey) -> bool:
        """Record that a worker has reconnected, so it did not die. Return whether a choice waited for this."""
        return self._suspicion.returned(worker)

    def _condemned(self, poison: set[Prompt], live: Iterable[Generation]) -> list[Generation]:
        if not poison:
            return []
        self.found += len(poison)
        condemned = [each for each in live if not poison.isdisjoint(map(_fingerprint, each.siblings))]
        requests = sorted({generation.request_id for generation in condemned})
        log.error("prompts have killed workers", prompts=len(poison), requests=requests)
        return condemned

    def token(self, generation: Generation) -> bool:
        """Return whether a choice on trial has passed the stage for which it was suspected, now that it has a new
        token.
        """
        trial = generation.trial
        if trial is None or len(generation.output) < trial.until:
            return False
        self._passed(generation, trial.stage)
        return True

    def ended(self, generation: Generation, *, well: bool) -> None:
        """Record the end of a choice. If it ended `well`, its prompt is cleared."""
        if well:
            self._suspicion.ended_well(_fingerprint(generation), self._clock.now_ns())
            if generation.trial is not None:
                self._passed(generation, WorkStage.TOKENS)
        self._on_trial.pop(generation, None)
        self._first_tries.ended(generation)

    def batches(self, waiting: Sequence[Generation], live: Iterable[Generation], now_ns: int) -> Iterator[BindingBatch]:
        """Yield the waiting choices in batches: isolated suspects one by one, then other suspects, then all others.

        Each batch must be bound before the next one is requested.
        """
        if not self:
            yield BindingBatch(waiting)
            return
        for generation in filter(self._is_apart, waiting):
            if not self._held_back(generation, live, now_ns):
                yield BindingBatch([generation], barred=self._barred(generation, now_ns))
        on_trial = [each for each in waiting if each.trial is not None and not self._is_apart(each)]
        yield BindingBatch(on_trial, avoided=self._taken())
        yield BindingBatch([each for each in waiting if each.trial is None])

    def _is_apart(self, generation: Generation) -> bool:
        return generation.trial is not None and self._suspicion.is_alone(_fingerprint(generation))

    def _held_back(self, generation: Generation, live: Iterable[Generation], now_ns: int) -> bool:
        """Return whether a suspect must not start now.

        It must wait while its lost workers may return, and while another choice with its prompt is tested on a worker.
        """
        prompt = _fingerprint(generation)
        if self._suspicion.is_accused(prompt):
            return True
        if now_ns - generation.timeline.queued_ns >= APART_NS:
            return False
        return any(self._exposed(other) and _fingerprint(other) == prompt for other in live)

    def _barred(self, generation: Generation, now_ns: int) -> frozenset[str]:
        """Return the workers with other suspects, which an isolated suspect must not use."""
        if now_ns - generation.timeline.queued_ns >= APART_NS:
            return frozenset()
        others = (other for other in self._on_trial if other.siblings is not generation.siblings)
        return frozenset(worker_id for other in others for worker_id in _workers(other))

    def _taken(self) -> frozenset[str]:
        """Return the workers with an isolated suspect, which other suspects should not use."""
        return frozenset(
            worker_id
            for generation in self._on_trial
            if self._is_apart(generation)
            for worker_id in _workers(generation)
        )

    def _try(self, generation: Generation) -> None:
        stage = self._suspicion.stage(_fingerprint(generation), self._clock.now_ns())
        if stage is None:
            return
        more = 1 if stage is WorkStage.PROMPT else FRESH_TOKENS
        generation.trial = SuspectTrial(stage, len(generation.output) + more)
        self._on_trial[generation] = None

    def _held(self, generation: Generation, attempt: Attempt) -> HeldChoice | None:
        """Return the stage of a choice on a worker, or None if nothing of it was computed there.

        Nothing was computed if its blocks are waiting or in transit, or if the worker may have died before it read the
        choice.
        """
        placement = generation.placement
        computed_elsewhere = placement.prefilling and attempt is not placement.prompt_attempt
        waits = attempt.phase is Phase.PREFILL and not placement.prefilling
        if computed_elsewhere or waits or self._quiet(attempt):
            return None
        first = WorkStage.AGAIN if generation.output else WorkStage.PROMPT
        stage = WorkStage.TOKENS if attempt.phase is Phase.DECODE or attempt.tokens else first
        request = frozenset(map(_fingerprint, generation.siblings or (generation,)))
        return HeldChoice(_fingerprint(generation), request, stage, attempt.tokens)

    def _exposed(self, generation: Generation) -> bool:
        """Return whether a choice is on a worker in a stage in which it may kill the worker."""
        held = (self._held(generation, attempt) for attempt in _attempts(generation))
        return any(seen is not None and seen.exposed for seen in held)

    def _passed(self, generation: Generation, stage: WorkStage) -> None:
        self._suspicion.passed(_fingerprint(generation), stage)
        generation.trial = None
        self._on_trial.pop(generation, None)


class PoisonCollector(Collector):
    """The metrics of poison prompts, read at each scrape."""

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects

    def collect(self) -> Iterator[Metric]:
        found, refused = self._suspects.found, self._suspects.refused
        yield GaugeMetricFamily(names.GATEWAY_POISON_PROMPTS, "Prompts refused now.", self._suspects.remembered)
        yield CounterMetricFamily(names.GATEWAY_POISON_FOUND_TOTAL, "Prompts that two workers died of.", found)
        yield CounterMetricFamily(names.GATEWAY_POISON_REFUSED_TOTAL, "Requests refused for such a prompt.", refused)


def poison_error() -> PoisonRequest:
    """Return the error for a request that has killed two workers."""
    return PoisonRequest(f"{LOST}: it is not given to others")


def _fingerprint(generation: Generation) -> Prompt:
    """Return a hash of the model, prompt and images. Sampling parameters are not included."""
    if not generation.fingerprint:
        model = generation.model.encode()
        images = b"".join(image.span.digest for image in generation.images)
        content = b"%d:%b%b%b" % (len(model), model, generation.prompt, images)
        generation.fingerprint = xxhash.xxh3_128_digest(content)
    return generation.fingerprint


def _key(generation: Generation) -> Key:
    return generation.context.tenant, _fingerprint(generation)


def _attempts(generation: Generation) -> list[Attempt]:
    placement = generation.placement
    return [attempt for attempt in (placement.prompt_attempt, placement.decode_attempt) if attempt is not None]


def _workers(generation: Generation) -> set[str]:
    """Return the ids of the workers that a choice is on, or for which it has a reserved credit."""
    reserved = generation.placement.reserved
    return {attempt.worker[0] for attempt in _attempts(generation)} | ({reserved[0]} if reserved is not None else set())
