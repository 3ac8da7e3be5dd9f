"""Choices whose prompts may have killed a worker: kept apart, let go once they are past, ended when it is sure."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import structlog
import xxhash
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.contracts.errors import PoisonRequest
from libs.dispatch.generation import Generation
from libs.policy.gateway.effects import Attempt, WorkerKey
from libs.policy.gateway.first_tries import FirstTries, Key
from libs.policy.gateway.suspicion import (
    FRESH_TOKENS,
    MAX_LOST_WORKERS,
    HeldChoice,
    Prompt,
    SuspectTrial,
    Suspicion,
    WorkStage,
)
from libs.policy.roles import Phase
from libs.runtime.clock import Clock

log = structlog.get_logger()

APART_NS = 5_000_000_000
"""How long a suspect waits at most for a worker without another one: then it goes to any."""
LOST = f"{MAX_LOST_WORKERS} workers were lost while they computed this prompt"


class Suspects:
    """Follows the choices of one gateway; `Suspicion` decides."""

    def __init__(self, clock: Clock, memory_s: float, quiet: Callable[[Attempt], bool]) -> None:
        """`quiet`: whether the worker of an attempt may have been dead already when the choice was sent there."""
        self._clock = clock
        self._quiet = quiet
        self._suspicion = Suspicion(round(memory_s * 1e9))
        self._first_tries: FirstTries[Generation] = FirstTries()
        self._on_trial: dict[Generation, None] = {}
        """In the order in which they came."""
        self.found = 0
        """Prompts that were found to be poison."""
        self.refused = 0
        """Requests refused because one of their prompts was."""

    def __bool__(self) -> bool:
        """Whether any choice is on trial."""
        return bool(self._on_trial)

    @property
    def remembered(self) -> int:
        """Prompts that are refused now."""
        return self._suspicion.poison(self._clock.now_ns())

    def admit(self, generations: Sequence[Generation]) -> None:
        """Take the choices of one request; raises PoisonRequest for one that is remembered."""
        prompts: set[Prompt] = set()
        now_ns = self._clock.now_ns()
        if self._suspicion:
            prompts = {_fingerprint(generation) for generation in generations}
            if any(self._suspicion.is_poison(prompt, now_ns) for prompt in prompts):
                self.refused += 1
                raise PoisonRequest(f"{LOST}, not long ago: it is not given to others for now")
        for generation in generations:
            generation.siblings = generations
            if prompts:
                self._try(generation)
            if generation.prompt:  # the lab's have a length and no tokens
                self._first_tries.came(generation, _key(generation), now_ns)

    def first_tries(self) -> Callable[[Generation], bool]:
        """Whether a waiting choice may go to workers, as far as others with its prompt are concerned; for one round.
        What is on trial goes by the rules for that."""
        may_start = self._first_tries.round()
        return lambda generation: generation.trial is not None or may_start(generation)

    def bound(self, generation: Generation) -> None:
        """It goes to workers."""
        self._first_tries.bound(generation)

    def waits(self, generation: Generation) -> None:
        """It waits for workers, at first or again."""
        self._first_tries.waits(generation)

    def computed(self, generation: Generation) -> None:
        """A choice has its first token."""
        if generation.prompt:
            self._first_tries.computed(_key(generation), self._clock.now_ns())

    def lost(self, worker: WorkerKey, attempts: Iterable[tuple[Generation, Attempt]]) -> None:
        """The stream to a worker broke with these, for all that can be seen because it died."""
        held = [(each, seen) for each, attempt in attempts if (seen := self._held(each, attempt)) is not None]
        self._suspicion.lost(worker, [seen for _, seen in held], self._clock.now_ns())
        for generation, _ in held:
            self._try(generation)
            for other in self._first_tries.waiting_with(generation):
                self._try(other)

    def died(self, worker: WorkerKey, live: Iterable[Generation]) -> list[Generation]:
        """The worker of a broken stream cannot be reached any more; the choices that end by that."""
        return self._condemned(self._suspicion.died(worker, self._clock.now_ns()), live)

    def overdue(self, live: Iterable[Generation]) -> list[Generation]:
        """Choices that end since no more of the workers that they have lost has been heard."""
        return self._condemned(self._suspicion.overdue(self._clock.now_ns()), live)

    def returned(self, worker: WorkerKey) -> bool:
        """A worker has said who it is: if it had been lost, it was not killed; whether a choice waited for that."""
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
        """A choice on trial has a new token; whether it is past what it was suspected for."""
        trial = generation.trial
        if trial is None or len(generation.output) < trial.until:
            return False
        self._passed(generation, trial.stage)
        return True

    def ended(self, generation: Generation, *, well: bool) -> None:
        """A choice is over."""
        if well:
            self._suspicion.ended_well(_fingerprint(generation), self._clock.now_ns())
            if generation.trial is not None:
                self._passed(generation, WorkStage.TOKENS)
        self._on_trial.pop(generation, None)
        self._first_tries.ended(generation)

    def apart(self, generation: Generation) -> bool:
        """Whether a choice is to be kept from other suspects."""
        return generation.trial is not None and self._suspicion.is_alone(_fingerprint(generation))

    def held_back(self, generation: Generation, live: Iterable[Generation], now_ns: int) -> bool:
        """Whether a suspect is to go nowhere now: more has to be known of the workers that it has lost, or the same
        prompt is on a worker already, which will show what comes of it."""
        prompt = _fingerprint(generation)
        if self._suspicion.is_accused(prompt):
            return True
        if now_ns - generation.timeline.queued_ns >= APART_NS:
            return False
        return any(self._exposed(other) and _fingerprint(other) == prompt for other in live)

    def barred(self, generation: Generation, now_ns: int) -> frozenset[str]:
        """Workers that a suspect which is kept apart must not go to now: other suspects are there."""
        if now_ns - generation.timeline.queued_ns >= APART_NS:
            return frozenset()
        others = (other for other in self._on_trial if other.siblings is not generation.siblings)
        return frozenset(worker_id for other in others for worker_id in _workers(other))

    def taken(self) -> frozenset[str]:
        """Workers on which a suspect is kept apart: others that are suspected do better to go elsewhere."""
        return frozenset(
            worker_id for generation in self._on_trial if self.apart(generation) for worker_id in _workers(generation)
        )

    def _try(self, generation: Generation) -> None:
        stage = self._suspicion.stage(_fingerprint(generation), self._clock.now_ns())
        if stage is None:
            return
        more = 1 if stage is WorkStage.PROMPT else FRESH_TOKENS
        generation.trial = SuspectTrial(stage, len(generation.output) + more)
        self._on_trial[generation] = None

    def _held(self, generation: Generation, attempt: Attempt) -> HeldChoice | None:
        """What a choice was doing on a worker; None where nothing of it was computed there: its blocks wait, or are on
        their way, or it was sent to a worker that may have been dead by then."""
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
        """Whether a choice is on a worker which may die of it."""
        held = (self._held(generation, attempt) for attempt in _attempts(generation))
        return any(seen is not None and seen.exposed for seen in held)

    def _passed(self, generation: Generation, stage: WorkStage) -> None:
        self._suspicion.passed(_fingerprint(generation), stage)
        generation.trial = None
        self._on_trial.pop(generation, None)


class PoisonCollector(Collector):
    """Prompts that workers have died of."""

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects

    def collect(self) -> Iterator[Metric]:
        """Found, remembered, refused."""
        found, refused = self._suspects.found, self._suspects.refused
        yield GaugeMetricFamily(names.GATEWAY_POISON_PROMPTS, "Prompts refused now.", self._suspects.remembered)
        yield CounterMetricFamily(names.GATEWAY_POISON_FOUND_TOTAL, "Prompts that two workers died of.", found)
        yield CounterMetricFamily(names.GATEWAY_POISON_REFUSED_TOTAL, "Requests refused for such a prompt.", refused)


def poison_error() -> PoisonRequest:
    """What a request ends with that has taken two workers with it."""
    return PoisonRequest(f"{LOST}: it is not given to others")


def _fingerprint(generation: Generation) -> Prompt:
    """A hash of everything that the prompt's computation depends on, without sampling."""
    if not generation.fingerprint:
        model = generation.model.encode()
        generation.fingerprint = xxhash.xxh3_128_digest(b"%d:%b%b" % (len(model), model, generation.prompt))
    return generation.fingerprint


def _key(generation: Generation) -> Key:
    return generation.context.tenant, _fingerprint(generation)


def _attempts(generation: Generation) -> list[Attempt]:
    """Where a choice is."""
    placement = generation.placement
    return [attempt for attempt in (placement.prompt_attempt, placement.decode_attempt) if attempt is not None]


def _workers(generation: Generation) -> set[str]:
    """Where a choice is, or will be next."""
    reserved = generation.placement.reserved
    return {attempt.worker[0] for attempt in _attempts(generation)} | ({reserved[0]} if reserved is not None else set())
