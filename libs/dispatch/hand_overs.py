"""Running choices that their worker wants to hand over, until another one has a place or they end where they are."""

from libs.dispatch.generation import Generation
from libs.dispatch.ports import Links
from libs.dispatch.router import Router
from libs.policy.gateway.effects import Attempt
from libs.policy.gateway.view import Ask, Binding


class HandOvers:
    """Attempts whose worker leaves decode and that wait for a decode credit elsewhere.

    The worker hands over only once a credit is reserved, so a choice never waits between two workers.
    """

    def __init__(self) -> None:
        # By sequence id. Only the latest id of each choice is kept, so there are no more than live choices.
        self._asked: dict[int, tuple[Generation, Attempt]] = {}

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, generation: Generation, attempt: Attempt, sequence_id: int) -> None:
        """Record that the worker of `attempt` wants to hand it over. The next attempt will have this id."""
        before = generation.placement.sequence_id
        if generation.placement.hands_over(attempt, sequence_id):
            self._asked.pop(before, None)
            self._asked[sequence_id] = generation, attempt

    def forget(self, generation: Generation) -> None:
        """Remove an attempt that needs no place any more."""
        self._asked.pop(generation.placement.sequence_id, None)

    def places(self, links: Links, router: Router, now_ns: int) -> list[tuple[Generation, Attempt, Binding]]:
        """Return the attempts that get a place, with their bindings. Silent workers get none: the choice runs where it
        is.
        """
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
