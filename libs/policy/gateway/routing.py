"""Routing policies: of the workers that could serve a request, which one does. Pure and without state of their own."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, Protocol

from libs.policy.gateway.prediction import first_token_ns, hidden_ns, second_token_ns
from libs.policy.gateway.view import Ask, WorkerRoom

PolicyName = Literal["predicted-ttft", "least-loaded", "round-robin"]

EQUAL_SHARE = 0.05
EQUAL_NS = 2e6
"""Predictions no further apart than this share of the best and this time are as good as equal."""


class RoutingPolicy(Protocol):
    """Chooses among one or more rooms; `bind` has seen to credits, models and blocks."""

    def prompt(self, ask: Ask, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        """Where its prompt is computed; a room that takes both is where it stays."""
        ...

    def decode(self, ask: Ask, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
        """Where its tokens are made, once its prompt is computed at `source` or was before."""
        ...


class PredictedTtft:
    """The soonest first token, then the soonest second one; equal predictions go to the least loaded.

    A cached prefix counts for the time it saves there and now, so a holder with a backlog loses to an idle worker.
    """

    def prompt(self, ask: Ask, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        """By predicted time to first token."""
        return _soonest(rooms, [first_token_ns(ask, room) for room in rooms])

    def decode(self, ask: Ask, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
        """By predicted time from first to second token."""
        if len(rooms) == 1:
            return rooms[0]
        hidden = hidden_ns(ask, source)
        return _soonest(rooms, [second_token_ns(ask, room, hidden) for room in rooms])


class LeastLoaded:
    """The fewest sequences, whatever their length and whatever is cached."""

    def prompt(self, ask: Ask, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        """By sequences there."""
        return min(rooms, key=_by_load)

    def decode(self, ask: Ask, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
        """By sequences there."""
        return min(rooms, key=_by_load)


class RoundRobin:
    """Each in turn, as far as they have credits."""

    def prompt(self, ask: Ask, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        """The one that was bound longest ago."""
        return min(rooms, key=_by_turn)

    def decode(self, ask: Ask, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
        """The one that was bound longest ago."""
        return min(rooms, key=_by_turn)


POLICIES: Final[Mapping[PolicyName, Callable[[], RoutingPolicy]]] = MappingProxyType(
    {"predicted-ttft": PredictedTtft, "least-loaded": LeastLoaded, "round-robin": RoundRobin}
)


def _soonest(rooms: Sequence[WorkerRoom], times_ns: Sequence[float]) -> WorkerRoom:
    bound_ns = min(times_ns) * (1 + EQUAL_SHARE) + EQUAL_NS
    soon = [room for room, time_ns in zip(rooms, times_ns, strict=True) if time_ns <= bound_ns]
    return min(soon, key=_by_load) if len(soon) > 1 else soon[0]


def _by_load(room: WorkerRoom) -> tuple[int, bool, int, str]:
    return room.load, room.view.takes_both, room.turn, room.view.id


def _by_turn(room: WorkerRoom) -> tuple[int, str]:
    return room.turn, room.view.id
