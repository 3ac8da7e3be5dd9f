"""Which waiting requests are bound to which workers: views in, bindings out.

A request is bound only against credits. Its decode worker is chosen together with its prefill worker, so that a
prompt is computed only where its tokens have somewhere to go.
"""

from collections.abc import Iterable, Sequence

from libs.policy.gateway.prediction import predict, take
from libs.policy.gateway.routing import RoutingPolicy
from libs.policy.gateway.view import Ask, Binding, WorkerRoom, WorkerView


class _Market:
    """The workers of one model that still have credits in this round."""

    def __init__(self) -> None:
        self.prompts: list[WorkerRoom] = []
        self.both: list[WorkerRoom] = []
        # By kind of KV.
        self.decodes: dict[str, list[WorkerRoom]] = {}

    def add(self, room: WorkerRoom) -> None:
        view = room.view
        if view.takes_prefill and room.prefill_credits > 0:
            self.prompts.append(room)
        if room.decode_credits > 0:
            if view.takes_both:
                self.both.append(room)
            if view.takes_decode:
                self.decodes.setdefault(view.kv_kind, []).append(room)

    def drop_spent(self, room: WorkerRoom) -> None:
        """Remove a worker that has no credits left in this round."""
        view = room.view
        if room in self.prompts and room.prefill_credits <= 0:
            self.prompts.remove(room)
        if room.decode_credits <= 0:
            if room in self.both:
                self.both.remove(room)
            if room in self.decodes.get(view.kv_kind, ()):
                self.decodes[view.kv_kind].remove(room)


def bind(asks: Iterable[Ask], workers: Sequence[WorkerView], policy: RoutingPolicy, now_ns: int = 0) -> list[Binding]:
    """Bind requests in the order of `asks`.

    A request that finds no room holds up all later ones of its model, so that none starves.
    """
    markets: dict[str, _Market] = {}
    for view in workers:
        market = markets.get(view.model)
        if market is None:
            market = markets[view.model] = _Market()
        market.add(WorkerRoom.of(view, now_ns))
    turn = max((view.turn for view in workers), default=0)
    bindings: list[Binding] = []
    for ask in asks:
        if not markets:
            break
        market = markets.get(ask.model)
        if market is None:
            continue
        pair = _choose(ask, market, policy)
        if pair is None:
            del markets[ask.model]
            continue
        source, room = pair
        turn += 1
        predicted = predict(ask, source, room)
        take(ask, source, room, turn)
        market.drop_spent(room)
        if source is not None and source is not room:
            market.drop_spent(source)
        bindings.append(Binding(ask.sequence_id, source.view.id if source else None, room.view.id, predicted))
    return bindings


def _choose(ask: Ask, market: _Market, policy: RoutingPolicy) -> tuple[WorkerRoom | None, WorkerRoom] | None:
    if ask.kv_kind is not None:
        fitting = market.decodes.get(ask.kv_kind)
        return (None, policy.decode(ask, _preferred(ask, fitting), None)) if fitting else None
    prompts = (room for room in market.prompts if room.admits(ask) and market.decodes.get(room.view.kv_kind))
    possible = [room for room in (*prompts, *market.both) if room.runs_out_of_prompts]
    if not possible:
        return None
    source = policy.prompt(ask, _preferred(ask, possible))
    if source.view.takes_both:
        return source, source
    return source, policy.decode(ask, _preferred(ask, market.decodes[source.view.kv_kind]), source)


def _preferred(ask: Ask, rooms: Sequence[WorkerRoom]) -> Sequence[WorkerRoom]:
    """Return the workers not to be avoided, or all of them if there are no others."""
    if not ask.avoid:
        return rooms
    return [room for room in rooms if room.view.id not in ask.avoid] or rooms
