"""Running choices that their worker wants to hand over, until another one has a place or they end where they are."""

from libs.dispatch.generation import Generation
from libs.dispatch.ports import Links
from libs.dispatch.router import Router
from libs.policy.gateway.effects import Attempt
from libs.policy.gateway.view import Ask, Binding


class HandOvers:
    """Attempts whose worker leaves decode. A place is a decode credit elsewhere; only then does the worker hand
    over, so a choice never waits between two workers."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[Generation, Attempt]] = {}
        """By sequence id; of each choice the latest alone counts, so there are no more than live."""

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, generation: Generation, attempt: Attempt, sequence_id: int) -> None:
        """The worker of `attempt` wants to hand it over; from now on its next attempt has this id."""
        before = generation.placement.sequence_id
        if generation.placement.hands_over(attempt, sequence_id):
            self._asked.pop(before, None)
            self._asked[sequence_id] = generation, attempt

    def forget(self, generation: Generation) -> None:
        """Remove an attempt that needs no place any more."""
        self._asked.pop(generation.placement.sequence_id, None)

    def places(self, links: Links, router: Router, now_ns: int) -> list[tuple[Generation, Attempt, Binding]]:
        """Whose place is where. None is taken on a worker that is silent for now: the choice runs where it is."""
        views = links.views()
        takes_decode = {view.id for view in views if view.takes_decode}
        # One whose worker decodes again, or where it has ended, needs none any more.
        self._asked = {
            sequence_id: (generation, attempt)
            for sequence_id, (generation, attempt) in self._asked.items()
            if attempt in (generation.placement.prompt_attempt, generation.placement.decode_attempt)
            and generation.placement.sequence_id == sequence_id
            and attempt.worker[0] not in takes_decode
        }
        asks = [
            _ask(generation, partner.kv_kind)
            for generation, attempt in self._asked.values()
            if (link := links.link(attempt.worker)) is not None and (partner := link.partner()) is not None
        ]
        heard = [view for view in views if view.id not in links.quiet]
        return [(*self._asked.pop(binding.sequence_id), binding) for binding in router.bind(asks, heard, now_ns)]


def _ask(generation: Generation, kv_kind: str) -> Ask:
    placement = generation.placement
    return Ask(
        sequence_id=placement.sequence_id,
        model=generation.model,
        tokens=generation.tokens,
        kv_kind=kv_kind,
        cached_tokens=generation.cached_hints,
        avoid=frozenset(placement.avoid),
    )
