"""Which waiting request goes to which workers. Pure: views in, bindings out.

A request is bound only against credits. Its decode worker is chosen together with its prefill worker, so that a prompt
is computed only where its tokens have somewhere to go.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as one gateway sees it at one moment."""

    id: str
    model: str
    kv_kind: str
    """Workers with equal kinds can exchange blocks."""
    takes_prefill: bool
    takes_decode: bool
    takes_both: bool
    prefill_credits: int
    decode_credits: int
    """A request that runs on one worker from start to end is bound against one of these."""
    load: int
    """Sequences there, running, waiting and bound."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What one waiting request needs."""

    key: int
    model: str
    kv_kind: str | None = None
    """Set when its prompt is computed and its blocks wait for a decode worker of this kind."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens whose KV a worker holds already, by worker id."""
    avoid: frozenset[str] = frozenset()
    """Workers that failed it: taken only where there are no others."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Who serves a request."""

    key: int
    prompt_worker: str | None
    """None: the prompt is computed already."""
    decode_worker: str
    """Equal to `prompt_worker` when one worker does both."""


@dataclass(slots=True)
class _Room:
    """A view, less what this round has bound."""

    view: WorkerView
    prefill: int
    decode: int
    load: int

    def take(self, *, prefill: int = 0, decode: int = 0) -> None:
        self.prefill -= prefill
        self.decode -= decode
        self.load += 1


def bind(asks: Iterable[Ask], workers: Sequence[WorkerView]) -> list[Binding]:
    """Bind in the order of `asks`; one that finds no room holds up all later ones of its model, so none is starved."""
    rooms: dict[str, list[_Room]] = {}
    for view in sorted(workers, key=lambda view: view.id):
        room = _Room(view, view.prefill_credits, view.decode_credits, view.load)
        rooms.setdefault(view.model, []).append(room)
    open_models = {model for model, of_model in rooms.items() if any(room.decode > 0 for room in of_model)}
    bindings: list[Binding] = []
    for ask in asks:
        if not open_models:
            break
        if ask.model not in open_models:
            continue
        binding = _bind_decode(ask, rooms[ask.model]) if ask.kv_kind is not None else _bind(ask, rooms[ask.model])
        if binding is None:
            open_models.discard(ask.model)
        else:
            bindings.append(binding)
    return bindings


def _bind(ask: Ask, rooms: list[_Room]) -> Binding | None:
    """The least loaded worker for the prompt; at equal load the longest cached prefix counts, then a split pair."""
    best: tuple[tuple[bool, int, int, bool], _Room, _Room] | None = None
    for room in rooms:
        view = room.view
        if view.takes_prefill and room.prefill > 0:
            partner = _decode_room(ask, rooms, view.kv_kind)
        elif view.takes_both and room.decode > 0:
            partner = room
        else:
            continue
        if partner is None:
            continue
        rank = (view.id in ask.avoid, room.load, -ask.cached_tokens.get(view.id, 0), partner is room)
        if best is None or rank < best[0]:
            best = rank, room, partner
    if best is None:
        return None
    _, prompt_room, decode_room = best
    if prompt_room is decode_room:
        decode_room.take(decode=1)
    else:
        prompt_room.take(prefill=1)
        decode_room.take(decode=1)
    return Binding(ask.key, prompt_room.view.id, decode_room.view.id)


def _bind_decode(ask: Ask, rooms: list[_Room]) -> Binding | None:
    assert ask.kv_kind is not None
    room = _decode_room(ask, rooms, ask.kv_kind)
    if room is None:
        return None
    room.take(decode=1)
    return Binding(ask.key, None, room.view.id)


def _decode_room(ask: Ask, rooms: list[_Room], kv_kind: str) -> _Room | None:
    fitting = (r for r in rooms if r.view.takes_decode and r.view.kv_kind == kv_kind and r.decode > 0)
    return min(fitting, key=lambda room: (room.view.id in ask.avoid, room.load), default=None)
