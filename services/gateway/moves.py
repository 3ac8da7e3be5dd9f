"""Running choices that their worker would hand over, until a place is found for each or it ends where it is."""

from collections.abc import Mapping, Sequence

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.policy.gateway.view import Ask, WorkerView
from services.gateway.generation import Generation, Leg
from services.gateway.link import WorkerLink
from services.gateway.router import Router

MAX_MOVES = 32
"""Of one choice; a worker that would hand it over once more keeps it to its end."""
MAX_BOUNCES = 256
"""Of one choice, off workers that had another role by then: far more than roles change while it lives. Any more count
as failures, so that a worker that refuses for ever does not keep it going for ever."""
OTHER_ROLE = (pb.REFUSAL_CODE_STALE_ROLE, pb.REFUSAL_CODE_DRAINING)
"""What a worker refuses that has another role than its gateway knew, or leaves."""


class Moves:
    """Legs whose worker leaves the token phase. A place is a decode credit elsewhere; only then does the worker let go,
    so a choice never waits between two workers."""

    def __init__(self) -> None:
        self._asked: dict[int, Leg] = {}
        """By choice, so no more than those that live."""

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, leg: Leg) -> None:
        """The worker of `leg` would hand it over. It says so again with every role that it takes until then: what
        has its place already is on its way."""
        if leg.generation.reserved is None and leg.generation.moves < MAX_MOVES:
            self._asked[leg.generation.number] = leg

    def place(
        self,
        links: Mapping[str, WorkerLink],
        views: Sequence[WorkerView],
        router: Router,
        now_ns: int,
        *,
        hushed: frozenset[str],
    ) -> None:
        """Reserve a place wherever there is one, and have the worker let go. None is taken on a worker of `hushed`: the
        choice runs where it is."""
        takes_decode = {view.id for view in views if view.takes_decode}
        # One whose worker decodes again, or where it has ended, needs none any more.
        self._asked = {
            number: leg
            for number, leg in self._asked.items()
            if leg.link.legs.get(leg.sequence) is leg and leg.link.id not in takes_decode
        }
        heard = [view for view in views if view.id not in hushed]
        for binding in router.bind(map(_ask, self._asked.values()), heard, now_ns):
            leg = self._asked.pop(binding.key)
            links[binding.decode_worker].reserve(leg.generation)
            leg.link.hand_over(leg)

    def handed_over(self, leg: Leg, moved: pb.Moved) -> None:
        """The worker has let go: the leg stands for the blocks it left now, as that of a computed prompt does."""
        generation = leg.generation
        self._asked.pop(generation.number, None)
        if leg is generation.prompt_leg:
            generation.cached_tokens = generation.cached_tokens if generation.resumed else moved.cached_tokens
        elif generation.prompt_leg is not None:
            generation.prompt_leg.link.forget(generation.prompt_leg, abort=True)
        generation.prompt_leg, generation.decode_leg = leg, None
        generation.left(moved.kv, leg.link)
        generation.moves += 1


def count_reroute(generation: Generation, *, bounced: bool) -> None:
    """It goes elsewhere: a worker failed it, or had another role by then (`bounced`)."""
    if bounced and generation.bounces < MAX_BOUNCES:
        generation.bounces += 1
    else:
        generation.reroutes += 1


def _ask(leg: Leg) -> Ask:
    generation = leg.generation
    return Ask(
        key=generation.number,
        model=generation.model,
        tokens=generation.tokens,
        kv_kind=leg.link.kv_kind,
        cached_tokens=generation.cached_hints,
        avoid=frozenset(generation.avoid),
    )
