"""The attempts of choices on workers, and the calls that carry out their placements."""

from collections.abc import Iterator
from typing import NamedTuple

from libs.dispatch.generation import Generation
from libs.dispatch.ports import Links
from libs.policy.gateway.effects import (
    Attempt,
    Forget,
    Proceed,
    Release,
    Reserve,
    Submit,
    WorkerEffect,
    WorkerKey,
)
from libs.policy.roles import Phase

Found = tuple[Generation, Attempt]


class _There(NamedTuple):
    running: dict[int, Found]
    """Choices and their attempts by sequence id."""
    reserved: dict[Generation, None]
    """Choices with a reserved decode credit, in the order in which they got it."""


class Attempts:
    """Carries out the effects of placements on workers, and finds choices by the workers' sequence ids."""

    def __init__(self, links: Links) -> None:
        self._links = links
        # Holds only workers that have attempts.
        self._there: dict[WorkerKey, _There] = {}

    def __iter__(self) -> Iterator[Found]:
        return (found for there in self._there.values() for found in there.running.values())

    def at(self, worker: WorkerKey) -> dict[int, Found]:
        """Return the attempts on a worker by sequence id."""
        there = self._there.get(worker)
        return there.running if there is not None else {}

    def find(self, worker: WorkerKey, sequence_id: int) -> Found | None:
        """Return the choice with a worker's sequence id, or None if it is no longer there."""
        return self.at(worker).get(sequence_id)

    def leave(self, worker: WorkerKey) -> tuple[list[Found], list[Generation]]:
        """Remove a lost worker and return its attempts and the choices with a credit reserved there."""
        there = self._there.pop(worker, None)
        return ([], []) if there is None else (list(there.running.values()), list(there.reserved))

    def do(self, generation: Generation, effect: WorkerEffect) -> None:
        """Carry an effect out. A lost worker receives no call."""
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
        there = self._of(attempt.worker)
        there.running[attempt.sequence_id] = generation, attempt
        if attempt.phase is not Phase.PREFILL:
            there.reserved.pop(generation, None)
        if (link := self._links.link(attempt.worker)) is not None:
            link.submit(attempt, generation, effect.blocks)

    def _forget(self, effect: Forget) -> None:
        attempt = effect.attempt
        self.at(attempt.worker).pop(attempt.sequence_id, None)
        if (link := self._links.link(attempt.worker)) is not None:
            link.forget(attempt.sequence_id, abort=effect.abort)

    def _of(self, worker: WorkerKey) -> _There:
        there = self._there.get(worker)
        if there is None:
            there = self._there[worker] = _There({}, {})
        return there
