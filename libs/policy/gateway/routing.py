"""Routing policies: which of the workers that could serve a request does. They keep no state."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, Protocol

from libs.policy.gateway.prediction import first_token_ns, hidden_ns, second_token_ns
from libs.policy.gateway.view import Ask, WorkerRoom

PolicyName = Literal["predicted-ttft", "least-loaded", "round-robin"]

# Predictions within this share of the best plus this time are considered equal.
EQUAL_SHARE = 0.05
EQUAL_NS = 2e6


class RoutingPolicy(Protocol):
    """A choice among one or more rooms; `bind` has already checked credits, models and KV kinds."""

    def prompt(self, ask: Ask, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        """Return where the prompt is computed; a room that takes both phases also keeps the sequence."""
        ...

    def decode(self, ask: Ask, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
        """Return where tokens are decoded once the prompt is computed at `source`; None if it already is."""
        ...


class PredictedTtft:
    """The policy of the earliest first token, then the earliest second one; ties go to the least loaded worker.

    A cached prefix counts for the time it saves on that worker now, so a holder with a backlog loses to an idle
    worker.
    """

    def prompt(self, ask: Ask, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        return _soonest(rooms, [first_token_ns(ask, room) for room in rooms])

    def decode(self, ask: Ask, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
        if len(rooms) == 1:
            return rooms[0]
        hidden = hidden_ns(ask, source)
        return _soonest(rooms, [second_token_ns(ask, room, hidden) for room in rooms])


class LeastLoaded:
    """The policy of the fewest sequences, regardless of their length and of cached prefixes."""

    def prompt(self, ask: Ask, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        return min(rooms, key=_by_load)

    def decode(self, ask: Ask, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
        return min(rooms, key=_by_load)


class RoundRobin:
    """The policy of the worker bound longest ago among those with credits."""

    def prompt(self, ask: Ask, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        return min(rooms, key=_by_turn)

    def decode(self, ask: Ask, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
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
