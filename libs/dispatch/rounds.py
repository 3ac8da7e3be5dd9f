"""Binding rounds, and the attempts on workers that result from placements."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from libs.dispatch.generation import Generation
from libs.dispatch.ports import Links
from libs.policy.gateway.binding import RoutingPolicy, bind
from libs.policy.gateway.placement import (
    Attempt,
    Forget,
    Proceed,
    Release,
    Reserve,
    Submit,
    WorkerEffect,
    WorkerKey,
)
from libs.policy.gateway.view import Binding, BindingRequest, WorkerView, serves_decode
from libs.policy.roles import Phase


class Router:
    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy

    def round(
        self,
        waiting: Iterable[Generation],
        views: list[WorkerView],
        now_ns: int,
        *,
        quiet: frozenset[str],
        drop_stale_kv: Callable[[Generation], None],
        barred: frozenset[str] = frozenset(),
    ) -> list[Binding]:
        """Return bindings for `waiting`, in its order.

        `quiet` workers are used only if no others can be, `barred` ones never. `drop_stale_kv` is called for each
        choice whose KV blocks no remaining worker can read.
        """

        def binding_request(generation: Generation) -> BindingRequest:
            blocks = generation.placement.blocks
            if blocks is not None and not serves_decode(views, generation.model, blocks.kind):
                drop_stale_kv(generation)
                blocks = generation.placement.blocks
            kv_kind = blocks.kind if blocks is not None else None
            hopeful = now_ns < generation.hopeless_from_ns < inf
            due_ns = generation.ttft_deadline_unix_ns if hopeful else 0
            return _binding_request(generation, kv_kind, quiet, batch=generation.batch, due_ns=due_ns)

        open_to_all = [view for view in views if view.id not in barred] if barred else views
        return self.bind(map(binding_request, waiting), open_to_all, now_ns)

    def bind(self, requests: Iterable[BindingRequest], views: Sequence[WorkerView], now_ns: int) -> list[Binding]:
        """Return bindings in the order of `requests`, until workers have no more room."""
        if not any(view.decode_credits for view in views):
            requests = [request for request in requests if request.pooled]
            if not requests:
                return []
        return bind(requests, views, self._policy, now_ns)


def _binding_request(
    generation: Generation,
    kv_kind: str | None,
    quiet: frozenset[str] = frozenset(),
    *,
    batch: bool = False,
    due_ns: int = 0,
) -> BindingRequest:
    placement = generation.placement
    return BindingRequest(
        sequence_id=placement.sequence_id,
        model=generation.model,
        tokens=generation.tokens,
        kv_kind=kv_kind,
        cached_tokens=generation.cached_hints,
        avoid=quiet.union(placement.avoid),
        batch=batch,
        pooled=generation.pooled,
        images=generation.placed_images,
        due_ns=due_ns,
    )


Found = tuple[Generation, Attempt]


class _WorkerAttempts(NamedTuple):
    running: dict[int, Found]
    """The choices on the worker and their attempts, by sequence id."""
    reserved: dict[Generation, None]
    """The choices with a decode credit reserved at the worker, in order of reservation."""


class Attempts:
    """The attempts on workers. They carry out the effects of placements and find choices by sequence id."""

    def __init__(self, links: Links) -> None:
        self._links = links
        # Contains only workers with attempts.
        self._by_worker: dict[WorkerKey, _WorkerAttempts] = {}

    def __iter__(self) -> Iterator[Found]:
        return (found for attempts in self._by_worker.values() for found in attempts.running.values())

    def at(self, worker: WorkerKey) -> dict[int, Found]:
        """Return the attempts on a worker, by sequence id."""
        attempts = self._by_worker.get(worker)
        return attempts.running if attempts is not None else {}

    def find(self, worker: WorkerKey, sequence_id: int) -> Found | None:
        """Return the choice and attempt with a worker's sequence id, or None if it is no longer there."""
        return self.at(worker).get(sequence_id)

    def leave(self, worker: WorkerKey) -> tuple[list[Found], list[Generation]]:
        """Remove a lost worker. Return its attempts, and the choices with a credit reserved there."""
        attempts = self._by_worker.pop(worker, None)
        return ([], []) if attempts is None else (list(attempts.running.values()), list(attempts.reserved))

    def carry_out(self, generation: Generation, effect: WorkerEffect) -> None:
        """Carry out an effect. Effects on lost workers are ignored."""
        if isinstance(effect, Submit):
            self._submit(generation, effect)
        elif isinstance(effect, Forget):
            self._forget(effect)
        elif isinstance(effect, Reserve):
            self._of(effect.worker).reserved[generation] = None
            if (link := self._links.link(effect.worker)) is not None:
                link.reserve(generation.prompt_tokens)
        elif isinstance(effect, Release):
            self._of(effect.worker).reserved.pop(generation, None)
            if (link := self._links.link(effect.worker)) is not None:
                link.release(generation.prompt_tokens)
        elif (link := self._links.link(effect.attempt.worker)) is None:
            pass
        elif isinstance(effect, Proceed):
            link.proceed(effect.attempt.sequence_id, generation.output[effect.attempt.known :])
        else:
            link.hand_over(effect.attempt.sequence_id)

    def _submit(self, generation: Generation, effect: Submit) -> None:
        attempt = effect.attempt
        attempts = self._of(attempt.worker)
        attempts.running[attempt.sequence_id] = generation, attempt
        if attempt.phase is not Phase.PREFILL:
            attempts.reserved.pop(generation, None)
        if (link := self._links.link(attempt.worker)) is not None:
            link.submit(attempt, generation, effect.blocks)

    def _forget(self, effect: Forget) -> None:
        attempt = effect.attempt
        self.at(attempt.worker).pop(attempt.sequence_id, None)
        if (link := self._links.link(attempt.worker)) is not None:
            link.forget(attempt.sequence_id, abort=effect.abort)

    def _of(self, worker: WorkerKey) -> _WorkerAttempts:
        attempts = self._by_worker.get(worker)
        if attempts is None:
            attempts = self._by_worker[worker] = _WorkerAttempts({}, {})
        return attempts


class HandOvers:
    """Attempts whose worker is leaving the decode role, and which wait for a decode credit at another worker.

    A worker hands a sequence over only after a credit is reserved elsewhere, so that no choice waits between two
    workers.
    """

    def __init__(self) -> None:
        # By sequence id. Only the latest id of each choice is kept, so the size is bounded by the number of live
        # choices.
        self._wanted: dict[int, tuple[Generation, Attempt]] = {}

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def add(self, generation: Generation, attempt: Attempt, sequence_id: int) -> None:
        """Record that the worker of `attempt` wants to hand it over. The next attempt will have this sequence id."""
        before = generation.placement.sequence_id
        if generation.placement.hands_over(attempt, sequence_id):
            self._wanted.pop(before, None)
            self._wanted[sequence_id] = generation, attempt

    def forget(self, generation: Generation) -> None:
        """Remove the attempt of a choice that needs no decode credit any more."""
        self._wanted.pop(generation.placement.sequence_id, None)

    def bind(self, links: Links, router: Router, now_ns: int) -> list[tuple[Generation, Attempt, Binding]]:
        """Return the attempts that get a decode worker, with their bindings.

        Silent workers are not used. If no other worker has room, the choice continues where it is.
        """
        views = links.views()
        takes_decode = {view.id for view in views if view.takes_decode}
        # Attempts that have ended, or whose worker decodes again, need no other worker.
        self._wanted = {
            sequence_id: (generation, attempt)
            for sequence_id, (generation, attempt) in self._wanted.items()
            if attempt in (generation.placement.prompt_attempt, generation.placement.decode_attempt)
            and generation.placement.sequence_id == sequence_id
            and attempt.worker[0] not in takes_decode
        }
        requests = [
            _binding_request(generation, partner.kv_kind)
            for generation, attempt in self._wanted.values()
            if (link := links.link(attempt.worker)) is not None and (partner := link.partner()) is not None
        ]
        responsive = [view for view in views if view.id not in links.quiet]
        return [
            (*self._wanted.pop(binding.sequence_id), binding) for binding in router.bind(requests, responsive, now_ns)
        ]
