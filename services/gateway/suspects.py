"""Choices whose prompts may have killed a worker: kept apart, let go once they are past, ended when it is sure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import structlog
import xxhash
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.contracts.errors import PoisonRequest
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.policy.gateway.suspicion import FRESH_TOKENS, MAX_LOST_WORKERS, Held, Prompt, Stage, Suspicion
from libs.runtime.clock import Clock
from services.gateway.generation import Generation, Leg
from services.gateway.link import WorkerLink

log = structlog.get_logger()

APART_NS = 5_000_000_000
"""How long a suspect waits at most for a worker without another one: then it goes to any."""
LOST = f"{MAX_LOST_WORKERS} workers were lost while they computed this prompt"


@dataclass(frozen=True, slots=True)
class Trial:
    """What a suspected choice has to get past."""

    stage: Stage
    until: int
    """Output tokens that show it."""


class Suspects:
    """Follows the choices of one gateway; `Suspicion` decides."""

    def __init__(self, clock: Clock, memory_s: float) -> None:
        self._clock = clock
        self._suspicion = Suspicion(round(memory_s * 1e9))
        self._on_trial: dict[int, Generation] = {}
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
        if self._suspicion:
            now_ns = self._clock.now_ns()
            prompts = {_fingerprint(generation) for generation in generations}
            if any(self._suspicion.is_poison(prompt, now_ns) for prompt in prompts):
                self.refused += 1
                raise PoisonRequest(f"{LOST}, not long ago: it is not given to others for now")
        for generation in generations:
            generation.siblings = generations
            if prompts:
                self._try(generation)
        if len(generations) > MAX_LOST_WORKERS:
            _choose_leaders(generations)

    def lost(self, link: WorkerLink, legs: Iterable[Leg]) -> None:
        """The stream to a worker broke with these, for all that can be seen because it died."""
        held = [(leg, seen) for leg in legs if (seen := _held(leg)) is not None]
        self._suspicion.lost(_key(link), [seen for _, seen in held], self._clock.now_ns())
        for leg, _ in held:
            self._try(leg.generation)

    def died(self, link: WorkerLink, live: Iterable[Generation]) -> list[Generation]:
        """The worker of a broken stream cannot be reached any more; the choices that end by that."""
        return self._condemned(self._suspicion.died(_key(link), self._clock.now_ns()), live)

    def overdue(self, live: Iterable[Generation]) -> list[Generation]:
        """Choices that end since no more of the workers that they have lost has been heard."""
        return self._condemned(self._suspicion.overdue(self._clock.now_ns()), live)

    def returned(self, link: WorkerLink) -> bool:
        """A worker has said who it is: if it had been lost, it was not killed; whether a choice waited for that."""
        return self._suspicion.returned(_key(link))

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
                self._passed(generation, Stage.TOKENS)
        self._on_trial.pop(generation.number, None)

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
        return any(_exposed(other) and _fingerprint(other) == prompt for other in live)

    def barred(self, generation: Generation, now_ns: int) -> frozenset[str]:
        """Workers that a suspect which is kept apart must not go to now: other suspects are there."""
        if now_ns - generation.timeline.queued_ns >= APART_NS:
            return frozenset()
        others = (other for other in self._on_trial.values() if other.siblings is not generation.siblings)
        return frozenset(worker_id for other in others for worker_id in _workers(other))

    def taken(self) -> frozenset[str]:
        """Workers on which a suspect is kept apart: others that are suspected do better to go elsewhere."""
        return frozenset(
            worker_id
            for generation in self._on_trial.values()
            if self.apart(generation)
            for worker_id in _workers(generation)
        )

    def _try(self, generation: Generation) -> None:
        stage = self._suspicion.stage(_fingerprint(generation), self._clock.now_ns())
        if stage is None:
            return
        more = 1 if stage is Stage.PROMPT else FRESH_TOKENS
        generation.trial = Trial(stage, len(generation.output) + more)
        self._on_trial[generation.number] = generation

    def _passed(self, generation: Generation, stage: Stage) -> None:
        self._suspicion.passed(_fingerprint(generation), stage)
        generation.trial = None
        self._on_trial.pop(generation.number, None)


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


def _choose_leaders(generations: Sequence[Generation]) -> None:
    """Of choices with the same prompt as many go first as workers may be lost; the others wait for one of them."""
    leaders: dict[bytes, list[Generation]] = {}
    for generation in generations:
        first = leaders.setdefault(generation.prompt, [])
        if len(first) < MAX_LOST_WORKERS:
            first.append(generation)
        else:
            generation.leaders = first


def poison_error() -> PoisonRequest:
    """What a request ends with that has taken two workers with it."""
    return PoisonRequest(f"{LOST}: it is not given to others")


def _key(link: WorkerLink) -> tuple[str, int]:
    return link.id, link.incarnation


def _fingerprint(generation: Generation) -> Prompt:
    """Of what the prompt's computation depends on, sampling left out."""
    if not generation.fingerprint:
        model = generation.model.encode()
        generation.fingerprint = xxhash.xxh3_128_digest(b"%d:%b%b" % (len(model), model, generation.prompt))
    return generation.fingerprint


def _held(leg: Leg) -> Held | None:
    """What a leg was doing; None where nothing of it was computed there: its blocks wait, or are on their way, or it
    was sent to a worker that may have been dead by then."""
    generation = leg.generation
    computed_elsewhere = generation.prefilling and leg is not generation.prompt_leg
    waits = leg.phase == pb.PHASE_PREFILL and not generation.prefilling
    if computed_elsewhere or waits or leg.quiet:
        return None
    first = Stage.AGAIN if generation.output else Stage.PROMPT
    stage = Stage.TOKENS if leg.phase == pb.PHASE_DECODE or leg.tokens else first
    request = frozenset(map(_fingerprint, generation.siblings or (generation,)))
    return Held(_fingerprint(generation), request, stage, leg.tokens)


def _exposed(generation: Generation) -> bool:
    """Whether a choice is on a worker which may die of it."""
    legs = (generation.prompt_leg, generation.decode_leg)
    return any(leg is not None and (seen := _held(leg)) is not None and seen.exposed for leg in legs)


def _workers(generation: Generation) -> set[str]:
    """Where a choice is, or will be next."""
    links = [leg.link for leg in (generation.prompt_leg, generation.decode_leg) if leg is not None]
    links += [generation.reserved] if generation.reserved is not None else []
    return {link.id for link in links}
