"""The binding of waiting requests to workers: views in, bindings out.

A request is bound only against credits. Its decode worker is chosen together with its prefill worker, so that a
prompt is computed only where its tokens have somewhere to go.

A routing policy chooses by how long the request waits for its first and second token on each worker. TTFT is the time
of the prompts before it plus that of its own uncached tokens, at the worker's speed and beside that worker's decodes.
Images whose embeddings the worker lacks are encoded first. The second token waits for the part of the KV transfer that
does not overlap with the prompt, then for one decode step. The network, the gateway, sequences that begin to decode
later and KV space that is freed in time are not modelled.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, Protocol

from libs.policy.gateway.view import Binding, BindingPrediction, BindingRequest, PlacedImage, WorkerRoom, WorkerView
from libs.policy.speed import UNKNOWN_SPEED, Speed

# The prompt length in tokens at which speeds are compared.
_TYPICAL: Final = 1024
NO_KV_ROOM_NS = 10e9
"""The penalty for a worker without free KV blocks.

The request would wait for other sequences to end there or preempt them, which is worse than any acceptable queue.
"""


def prompt_ns(request: BindingRequest, room: WorkerRoom) -> float:
    """Return the time to compute the uncached part of the prompt; at least its last token is computed."""
    view, tokens = room.view, request.tokens
    cached = request.cached_tokens.get(view.id, 0)
    if cached >= tokens:
        cached = tokens - 1
    decodes = room.decode_sequences if view.takes_decode else 0
    beside_ns = view.speed.decode_ns(decodes, view.kv_tokens)
    return view.speed.prompt_ns(tokens - cached, tokens * tokens - cached * cached, beside_ns, decodes)


def encode_ns(images: Iterable[PlacedImage], cached_tokens: int, view: WorkerView) -> float:
    """Return the time to encode the images after the cached tokens whose embeddings the worker lacks, each once."""
    if not (images and view.image_ns):
        return 0.0
    lacking = {each.digest for each in images if each.end > cached_tokens and each.digest not in view.recent_images}
    return len(lacking) * view.image_ns


def least_encode_ns(
    images: Iterable[PlacedImage], cached_tokens: int, workers: Iterable[WorkerView], model: str
) -> float:
    """Return the minimum time, over the model's workers, to encode a prompt's images."""
    if not images:
        return 0.0
    able = (view for view in workers if view.model == model and _computes_prompts(view))
    return min((encode_ns(images, cached_tokens, view) for view in able), default=0.0)


def fastest_speed(workers: Iterable[WorkerView], model: str) -> Speed:
    """Return the fastest speed among the workers that compute prompts of a model."""
    speeds = {id(view.speed): view.speed for view in workers if view.model == model and _computes_prompts(view)}
    return min(speeds.values(), key=lambda speed: speed.prompt_ns(_TYPICAL, _TYPICAL**2), default=UNKNOWN_SPEED)


def first_token_ns(request: BindingRequest, room: WorkerRoom) -> float:
    """Return the time from now to the first token if the prompt goes to this worker."""
    wait_ns = room.backlog_ns + _encode_ns(request, room) + prompt_ns(request, room)
    return wait_ns if _missing_tokens(request, room) <= room.free_kv_tokens else wait_ns + NO_KV_ROOM_NS


def hidden_ns(request: BindingRequest, source: WorkerRoom | None) -> float:
    """Return the part of the KV transfer that can overlap with the prompt at `source`; 0 if it is already computed."""
    return prompt_ns(request, source) if source is not None and source.view.streams_kv else 0.0


def second_token_ns(request: BindingRequest, room: WorkerRoom, hidden_ns: float) -> float:
    """Return the time from the first to the second token if this worker pulls the KV, `hidden_ns` of it overlapped."""
    view = room.view
    missing = _missing_tokens(request, room)
    wait_ns = (room.arriving_kv_tokens + missing) * view.speed.kv_token_ns
    if view.streams_kv:
        wait_ns = max(wait_ns - hidden_ns, 0.0)
    wait_ns += _step_ns(request, room)
    return wait_ns if missing <= room.free_kv_tokens else wait_ns + NO_KV_ROOM_NS


def predict(request: BindingRequest, source: WorkerRoom | None, room: WorkerRoom | None) -> BindingPrediction:
    """Return both times for the chosen workers; an already computed prompt has a TTFT of 0.

    Without a decode worker, the request ends with its prompt.
    """
    if room is None:
        return BindingPrediction(first_token_ns(request, source) if source is not None else 0.0, 0.0)
    if source is room:
        return BindingPrediction(first_token_ns(request, room), _step_ns(request, room))
    ttft_ns = first_token_ns(request, source) if source is not None else 0.0
    return BindingPrediction(ttft_ns, second_token_ns(request, room, hidden_ns(request, source)))


def take(request: BindingRequest, source: WorkerRoom | None, room: WorkerRoom | None, turn: int) -> None:
    """Count a binding in the rooms, for later requests of the round."""
    if source is not None:
        source.backlog_ns += _encode_ns(request, source) + prompt_ns(request, source)
        source.prompt_tokens += max(_missing_tokens(request, source), 1)
        source.turn = turn
    if source is not None and source is not room:
        source.prefill_credits -= 1
        source.batch_prompts += request.batch
        source.load += 1
        source.free_kv_tokens -= _missing_tokens(request, source)
    if room is None:
        return
    missing = _missing_tokens(request, room)
    if source is not None and source is not room:
        room.arriving_kv_tokens += missing
    room.decode_credits -= 1
    room.load += 1
    room.turn = turn
    room.decode_sequences += 1
    room.free_kv_tokens -= missing


def _encode_ns(request: BindingRequest, room: WorkerRoom) -> float:
    return encode_ns(request.images, request.cached_tokens.get(room.view.id, 0), room.view) if request.images else 0.0


def _step_ns(request: BindingRequest, room: WorkerRoom) -> float:
    return room.view.speed.decode_ns(room.decode_sequences + 1, room.view.kv_tokens + request.tokens)


def _missing_tokens(request: BindingRequest, room: WorkerRoom) -> int:
    return max(request.tokens - request.cached_tokens.get(room.view.id, 0), 0)


def _computes_prompts(view: WorkerView) -> bool:
    return view.takes_prefill or view.takes_both


PolicyName = Literal["predicted-ttft", "least-loaded", "round-robin"]

# Predictions that differ from the best by less than this share plus this time count as equal.
EQUAL_SHARE = 0.05
EQUAL_NS = 2e6


class RoutingPolicy(Protocol):
    """A choice among one or more rooms; `bind` has already checked credits, models and KV kinds."""

    def prompt(self, request: BindingRequest, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        """Return where the prompt is computed; a room that takes both phases also keeps the sequence."""
        ...

    def decode(self, request: BindingRequest, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
        """Return where tokens are decoded once the prompt is computed at `source`; None if it is already computed."""
        ...


class PredictedTtft:
    """The policy of the earliest first token, then the earliest second one; ties go to the least loaded worker.

    A cached prefix counts for the time it saves on that worker now, so a holder with a backlog loses to an idle
    worker.
    """

    def prompt(self, request: BindingRequest, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        return _soonest(rooms, [first_token_ns(request, room) for room in rooms])

    def decode(self, request: BindingRequest, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
        if len(rooms) == 1:
            return rooms[0]
        hidden = hidden_ns(request, source)
        return _soonest(rooms, [second_token_ns(request, room, hidden) for room in rooms])


class LeastLoaded:
    """The policy that picks the worker with the fewest sequences, regardless of their lengths and cached prefixes."""

    def prompt(self, request: BindingRequest, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        return min(rooms, key=_by_load)

    def decode(self, request: BindingRequest, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
        return min(rooms, key=_by_load)


class RoundRobin:
    """The policy that picks the worker whose last binding is the oldest."""

    def prompt(self, request: BindingRequest, rooms: Sequence[WorkerRoom]) -> WorkerRoom:
        return min(rooms, key=_by_turn)

    def decode(self, request: BindingRequest, rooms: Sequence[WorkerRoom], source: WorkerRoom | None) -> WorkerRoom:
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


MOST_HELD: Final = 64
"""The maximum number of requests that let others pass in one round. After one more, no further request is
considered.
"""


_Pair = tuple[WorkerRoom | None, WorkerRoom | None]
"""The workers that compute a prompt and decode it."""


class _Market:
    """The workers of one model that have credits left in this round."""

    def __init__(self) -> None:
        self.has_prefill = False
        """True if some worker computes prompts alone, with or without credits."""
        self.holds = False
        """True if a request holds back later ones."""
        self.prompts: list[WorkerRoom] = []
        self.both: list[WorkerRoom] = []
        # By kind of KV.
        self.decodes: dict[str, list[WorkerRoom]] = {}

    def add(self, room: WorkerRoom) -> None:
        view = room.view
        self.has_prefill |= view.takes_prefill
        if view.takes_prefill and room.prefill_credits > 0:
            self.prompts.append(room)
        if room.decode_credits > 0:
            if view.takes_both:
                self.both.append(room)
            if view.takes_decode:
                self.decodes.setdefault(view.kv_kind, []).append(room)

    def bind(self, request: BindingRequest, pair: _Pair, turn: int) -> Binding:
        """Return the binding to a pair of workers, and count it in their rooms."""
        source, room = pair
        predicted = predict(request, source, room)
        take(request, source, room, turn)
        if room is not None:
            self._drop_spent(room)
        if source is not None and source is not room:
            self._drop_spent(source)
        prompt, decode = source.view.id if source else None, room.view.id if room else ""
        return Binding(request.sequence_id, prompt, decode, predicted)

    def _drop_spent(self, room: WorkerRoom) -> None:
        """Remove a worker whose credits for this round are used up."""
        view = room.view
        if room in self.prompts and room.prefill_credits <= 0:
            self.prompts.remove(room)
        if room.decode_credits <= 0:
            if room in self.both:
                self.both.remove(room)
            if room in self.decodes.get(view.kv_kind, ()):
                self.decodes[view.kv_kind].remove(room)


def bind(
    requests: Iterable[BindingRequest], workers: Sequence[WorkerView], policy: RoutingPolicy, now_ns: int = 0
) -> list[Binding]:
    """Bind requests in the order of `requests`.

    A request that finds no room holds up all later ones of its model, so that none starves. A request that would be
    late on a mixed worker lets requests pass that are in time there, since a prefill worker may compute it sooner. It
    may use the room left after them.
    """
    markets: dict[str, _Market] = {}
    for view in workers:
        market = markets.get(view.model)
        if market is None:
            market = markets[view.model] = _Market()
        market.add(WorkerRoom.of(view, now_ns))
    turn = max((view.turn for view in workers), default=0)
    bindings: list[Binding] = []
    held: list[BindingRequest] = []
    open_models = set(markets)
    for request in requests:
        if not open_models:
            break
        if request.model not in open_models:
            continue
        market = markets[request.model]
        pair = _choose(request, market, policy)
        if pair is None:
            open_models.remove(request.model)
        elif not _is_held(request, market, pair[0], now_ns):
            bindings.append(market.bind(request, pair, turn := turn + 1))
        elif len(held) < MOST_HELD:
            held.append(request)
            market.holds = True
        else:
            open_models.remove(request.model)
    for request in held:
        market = markets[request.model]
        pair = _choose(request, market, policy)
        if pair is not None:
            bindings.append(market.bind(request, pair, turn := turn + 1))
    return bindings


def _is_held(request: BindingRequest, market: _Market, source: WorkerRoom | None, now_ns: int) -> bool:
    """Return whether a request must let later ones pass, or must not pass one that does."""
    if source is None:
        return False
    late = not request.due_ns or now_ns + first_token_ns(request, source) > request.due_ns
    if market.holds:
        return late
    return late and request.due_ns > 0 and market.has_prefill and source.view.takes_both


def _choose(request: BindingRequest, market: _Market, policy: RoutingPolicy) -> _Pair | None:
    """Return where the prompt is computed and where tokens are decoded, or None without room."""
    if request.kv_kind is not None:
        fitting = market.decodes.get(request.kv_kind)
        return (None, policy.decode(request, _preferred(request, fitting), None)) if fitting else None
    prompts = (
        room
        for room in market.prompts
        if room.admits(request) and (request.pooled or market.decodes.get(room.view.kv_kind))
    )
    possible = [room for room in (*prompts, *market.both) if room.runs_out_of_prompts]
    if not possible:
        return None
    source = policy.prompt(request, _preferred(request, possible))
    if source.view.takes_both:
        return source, source
    if request.pooled:
        return source, None
    return source, policy.decode(request, _preferred(request, market.decodes[source.view.kv_kind]), source)


def _preferred(request: BindingRequest, rooms: Sequence[WorkerRoom]) -> Sequence[WorkerRoom]:
    """Return the workers not to be avoided, or all of them if there are no others."""
    if not request.avoid:
        return rooms
    return [room for room in rooms if room.view.id not in request.avoid] or rooms
