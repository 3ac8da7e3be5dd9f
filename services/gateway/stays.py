"""Which choices are on which workers, and what is done about it there."""

from collections.abc import Iterator
from typing import NamedTuple

from libs.policy.gateway.effects import (
    Forget,
    HandOver,
    Proceed,
    Release,
    Reserve,
    Stay,
    Submit,
    WorkerEffect,
    WorkerKey,
)
from libs.policy.roles import Phase
from services.gateway.generation import Generation
from services.gateway.ports import Link, Links

Found = tuple[Generation, Stay]


class _There(NamedTuple):
    running: dict[int, Found]
    """By sequence id."""
    reserved: dict[Generation, None]
    """That have a decode credit set aside; in the order in which they got it."""


class Stays:
    """Carries out what placements ask of workers, and finds choices by what workers call them."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._there: dict[WorkerKey, _There] = {}
        """Of workers that have anything."""

    def __iter__(self) -> Iterator[Found]:
        return (found for there in self._there.values() for found in there.running.values())

    def at(self, worker: WorkerKey) -> dict[int, Found]:
        """What is on a worker, by sequence id."""
        there = self._there.get(worker)
        return there.running if there is not None else {}

    def find(self, worker: WorkerKey, sequence_id: int) -> Found | None:
        """What a worker means; None where it is not there any more."""
        return self.at(worker).get(sequence_id)

    def leave(self, worker: WorkerKey) -> tuple[list[Found], list[Generation]]:
        """What was there, and what had a credit set aside there: the worker is lost with all of it."""
        there = self._there.pop(worker, None)
        return ([], []) if there is None else (list(there.running.values()), list(there.reserved))

    def do(self, generation: Generation, effect: WorkerEffect) -> None:
        """Carry an effect out."""
        worker = effect.worker if isinstance(effect, Reserve | Release) else effect.stay.worker
        self._note(generation, effect)
        link = self._links.link(worker)
        if link is not None:  # a worker that is lost with what was there need not hear of it
            _tell(link, generation, effect)

    def _note(self, generation: Generation, effect: WorkerEffect) -> None:
        match effect:
            case Submit(stay):
                there = self._there.setdefault(stay.worker, _There({}, {}))
                there.running[stay.sequence_id] = generation, stay
                if stay.phase is not Phase.PREFILL:
                    there.reserved.pop(generation, None)
            case Forget(stay):
                self.at(stay.worker).pop(stay.sequence_id, None)
            case Reserve(worker):
                self._there.setdefault(worker, _There({}, {})).reserved[generation] = None
            case Release(worker) if worker in self._there:
                self._there[worker].reserved.pop(generation, None)
            case _:
                pass


def _tell(link: Link, generation: Generation, effect: WorkerEffect) -> None:
    match effect:
        case Submit(stay, blocks):
            link.submit(stay, generation, blocks)
        case Forget(stay, abort):
            link.forget(stay.sequence_id, abort=abort)
        case Proceed(stay):
            link.proceed(stay.sequence_id, generation.output[stay.known :])
        case HandOver(stay):
            link.hand_over(stay.sequence_id)
        case Reserve():
            link.reserve(generation.prompt_tokens)
        case Release():
            link.release(generation.prompt_tokens)
