"""The dispatcher, which binds choices to workers and passes workers' events to each choice's placement.

libs/policy/gateway/binding.py decides which worker a choice gets. The dispatcher is synchronous: its decisions are sent
with the links' next frames. The location of a choice is stored in its placement only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

import structlog

from libs.contracts.errors import FulcrumError, NoWorkers
from libs.dispatch.early import early_news, keep_back, name_blocks
from libs.dispatch.generation import RETRY_AFTER_S, ApiFinishReason, EarlyNews, Ending, Experience, Generation
from libs.dispatch.places import ModelPlaces, Others, TenantPlaces
from libs.dispatch.ports import (
    AttemptEvent,
    ColdModels,
    Failed,
    HandOverWanted,
    KvOpened,
    Link,
    Links,
    OneForAll,
    Prefilled,
    QueuedDemand,
    SequenceFinished,
    SequenceHandedOver,
    SequenceRefused,
    Tenancy,
    Tokens,
    WorkerUpdate,
)
from libs.dispatch.rounds import Attempts, HandOvers, Router
from libs.dispatch.suspects import BindingBatch, Suspects, poison_error
from libs.dispatch.waiting import Arrivals, WaitingQueue, expired
from libs.engine.reports import Logprob
from libs.policy.gateway.order import WaitBounds
from libs.policy.gateway.outlook import lend_speeds
from libs.policy.gateway.placement import Attempt, Effects, End, Partner, Requeue, WorkerKey
from libs.policy.gateway.queues import Queue, WaitingAges, first_token_waits
from libs.policy.gateway.view import Binding, WorkerView, rooms, serves_decode
from libs.runtime.clock import Call, Clock, Scheduler

log = structlog.get_logger()

EXPIRY_INTERVAL_NS = 100_000_000
STOPPING = "this gateway is stopping"
# Ids wrap, because they are uint32 on the wire. No gateway has four billion choices at once.
SEQUENCE_IDS = 1 << 32

Ended = Callable[[Generation, Ending], None]
"""A listener that is called once at the end of each choice."""


@dataclass(frozen=True, slots=True)
class Bounds:
    max_waiting: int
    wait_bounds: WaitBounds
    max_reroutes: int
    """The maximum number of times that a choice is rerouted after a worker failed it."""


class Dispatcher:
    """The owner of every choice from `submit` until its end."""

    def __init__(
        self,
        *,
        links: Links,
        router: Router,
        clock: Clock,
        scheduler: Scheduler,
        ended: Ended,
        suspects: Suspects,
        bounds: Bounds,
        tenants: Tenancy | None = None,
    ) -> None:
        """Create the dispatcher.

        With `tenants` of None, all requests are treated alike in the queue and decode places.
        """
        self.max_reroutes = bounds.max_reroutes
        self.suspects = suspects
        self._links = links
        self._router = router
        self._clock = clock
        self._scheduler = scheduler
        self._ended = ended
        self._bounds = bounds
        self.cold: ColdModels | None = None
        """The source of expected load times for models without a worker; None without a model catalogue."""
        self._experience = Experience()
        tenants = tenants or OneForAll()
        self._queue = WaitingQueue(bounds.max_waiting, tenants)
        self.places = TenantPlaces(tenants)
        self._hand_overs = HandOvers()
        self._attempts = Attempts(links)
        self._arrivals = Arrivals()
        # In order of arrival.
        self._live: dict[Generation, None] = {}
        self._sequence_ids = count(1)
        self._turns = count(1)
        self._turn_is_due = False
        # Set once the dispatcher is draining.
        self._on_idle: Call | None = None

    # ------------------------------------------------------------ what metrics and other gateways read

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def late(self) -> int:
        """The number of queued choices whose first token can no longer meet its deadline."""
        return self._queue.late

    @property
    def hopeful_tokens(self) -> int:
        """The number of prompt tokens of queued choices that can still meet their deadline."""
        return self._queue.hopeful_tokens

    def waiting_for(self, model: str) -> int:
        return self._queue.of(model)

    @property
    def people_waiting(self) -> int:
        """The number of queued choices other than lines of batch jobs."""
        return len(self._queue) - self._queue.batch

    def queues(self) -> list[Queue]:
        """Return the queues by model and phase, with counts of arrivals."""
        return self._arrivals.queues(self._queue, self._links)

    def awaited(self) -> dict[str, WaitingAges]:
        """Return, by model, the waiting times of interactive choices without a first token, here and at workers."""
        return first_token_waits(self._live, self._clock.now_ns())

    def places_here(self) -> dict[str, ModelPlaces]:
        """Return this gateway's report of tenants' places, which other gateways adopt."""
        return self.places.report(self._queue.by_tenant(), rooms(self._links.views()), self._clock.now_ns())

    def places_elsewhere(self, others: Others) -> None:
        """Adopt the reports of other gateways; see `TenantPlaces.adopt_reports`."""
        self.places.adopt_reports(others)
        self._turn_soon()

    @property
    def live(self) -> int:
        """The number of choices that have not ended, including queued ones."""
        return len(self._live)

    @property
    def attempts(self) -> Attempts:
        return self._attempts

    @property
    def draining(self) -> bool:
        """Return whether the dispatcher refuses new choices and waits for the present ones to end."""
        return self._on_idle is not None

    @property
    def wants_keys(self) -> bool:
        """Return whether callers should pass keys to `check_room` and `submit`: some requests are or were refused."""
        return self._queue.wants_keys

    def check_room(self, count: int, key: bytes = b"", tenant: str | None = None) -> None:
        """Raise QueueFull if the queue has no room for `count` more choices, and NoWorkers while draining.

        A `tenant` may not use the room left for other tenants. `key` identifies a request that returns at its promised
        time.
        """
        if self.draining:
            raise NoWorkers(STOPPING, retry_after_s=RETRY_AFTER_S)
        now_ns = self._clock.now_ns()
        self._queue.check_room(count, now_ns, key)
        if tenant is not None:
            self._queue.check_tenant(tenant, count, now_ns)

    def submit(self, generations: Sequence[Generation], key: bytes = b"") -> None:
        """Enqueue all choices of one request, or none. Raise PoisonRequest, or the errors of `check_room`."""
        people = bool(generations) and not generations[0].batch
        self.check_room(len(generations), key, generations[0].context.tenant if people else None)
        self.suspects.admit(generations)
        self._queue.kept(key)
        for generation in generations:
            self._live[generation] = None
            self._arrivals.came(generation)
            self._wait(generation)

    def cancel(self, generation: Generation, because: FulcrumError | None) -> None:
        """End a choice and free its resources on workers.

        `because` is the error of another choice of the request, or None if the client has disconnected. Choices that
        have ended or were never submitted are ignored.
        """
        if generation in self._live:
            self._end(generation, because)

    def drain(self, on_idle: Call) -> None:
        """Refuse new choices, and call `on_idle` once the present ones have ended."""
        self._on_idle = on_idle
        if not self._live:
            on_idle()

    def stop(self) -> None:
        for generation in list(self._live):
            self._end(generation, NoWorkers(STOPPING, retry_after_s=RETRY_AFTER_S))

    def watch_time(self) -> None:
        """End choices that have waited too long, now and then every `EXPIRY_INTERVAL_NS`."""
        now_ns = self._clock.now_ns()
        drain_s = self._queue.drain_s(now_ns)
        if len(self._queue):
            views, wait_bounds = self._links.views(), self._bounds.wait_bounds
            for generation, error in expired(
                self._queue, views, wait_bounds, now_ns=now_ns, drain_s=drain_s, cold=self.cold
            ):
                self._end(generation, error)
        for generation in self.suspects.overdue(self._live):
            self._end(generation, poison_error())
        self._scheduler.at(now_ns + EXPIRY_INTERVAL_NS, self.watch_time)

    # ------------------------------------------------------------ binding

    def _next_id(self) -> int:
        return next(self._sequence_ids) % SEQUENCE_IDS

    def _wait(self, generation: Generation) -> None:
        self.places.left(generation)
        self.suspects.waits(generation)
        generation.placement.queued(self._next_id())
        generation.timeline.queued_ns = now_ns = self._clock.now_ns()
        self._queue.add(generation, now_ns)
        self._turn_soon()

    def _turn_soon(self) -> None:
        # One binding round serves all events in this turn of the event loop.
        if not self._turn_is_due:
            self._turn_is_due = True
            self._scheduler.soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        if len(self._queue) or self._hand_overs:
            self._bind()
        now_ns, demands = self._clock.now_ns(), dict[str, QueuedDemand]()
        contested = self.places.contested(self._queue.by_tenant())
        free = rooms(self._links.views()) if contested else {}
        self._make_room(contested, free, now_ns)
        for link in self._links.links:
            model = link.model
            if model not in demands:
                demands[model] = self._queue.demand(model, now_ns)
                if model in contested:
                    queue_state = demands[model], contested[model], free.get(model, 0)
                    demands[model] = self.places.within_share(model, *queue_state, now_ns)
            link.set_demand(demands[model])

    def _bind(self) -> None:
        links, now_ns = self._links.serving(), self._clock.now_ns()
        if self._hand_overs:
            for generation, attempt, binding in self._hand_overs.bind(self._links, self._router, now_ns):
                self._carry_out(generation, generation.placement.place_found(attempt, links[binding.decode_worker].key))
        if len(self._queue):
            views = self._links.views()
            self._queue.judge(views)
            suspects = self.suspects
            waiting = self._queue.in_order(
                now_ns, views, self.places, may_start=suspects.first_tries(), all_waiting=bool(suspects)
            )
            for batch in suspects.batches(waiting, self._live, now_ns):
                self._bind_these(batch, views or self._links.views(), links, now_ns)
                views = []  # outdated, because the batch has used room

    def _make_room(self, contested: Mapping[str, Mapping[str, int]], free: Mapping[str, int], now_ns: int) -> None:
        """Preempt choices of tenants above their share of a model's places if other tenants' choices wait."""
        for model, waiting in contested.items():
            for generation in self.places.giving_way(model, waiting, free.get(model, 0), now_ns):
                self._carry_out(
                    generation, generation.placement.gives_way("another tenant has less than its share of places")
                )

    def _bind_these(self, batch: BindingBatch, views: list[WorkerView], links: Mapping[str, Link], now_ns: int) -> None:
        quiet = self._links.quiet | batch.avoided
        bindings = self._router.round(
            batch.choices, views, now_ns, quiet=quiet, drop_stale_kv=self._drop_kv, barred=batch.barred
        )
        for binding in bindings:
            self._start(self._queue[binding.sequence_id], binding, links, now_ns)

    def _drop_kv(self, generation: Generation) -> None:
        self._carry_out(generation, generation.placement.drop_stale_kv())

    def _start(self, generation: Generation, binding: Binding, links: Mapping[str, Link], now_ns: int) -> None:
        self._queue.bound(generation, now_ns)
        if binding.decode_worker:
            self.places.bound(generation)
        self.suspects.bound(generation)
        generation.timeline.bound(now_ns, binding.predicted.ttft_ns)
        self._experience.bound(generation.model, generation.timeline)
        prompt = links[binding.prompt_worker] if binding.prompt_worker is not None else None
        decode = links[binding.decode_worker] if binding.decode_worker else None
        turn = next(self._turns)
        for link in (prompt, decode):
            if link is not None:
                link.outlook.turn = turn
        if decode is not None:
            prompt_key = None if prompt is None else prompt.key
            named = name_blocks(generation, prompt, decode)
            effects = generation.placement.bound(prompt_key, decode.key, len(generation.output), named)
            self._carry_out(generation, effects)
        elif prompt is not None:
            self._carry_out(generation, generation.placement.bound_to_prompt(prompt.key))

    # ------------------------------------------------------------ events from workers

    def received(self, link: Link, update: WorkerUpdate) -> None:
        """Process the tokens and then the events of a frame. A change of credits or role may start a binding round."""
        if update.introduced:
            self.suspects.returned(link.key)  # and the turn below is for choices that waited for it
        if update.tokens:
            self._tokens(link.key, update.tokens)
        for event in update.events:
            found = self._attempts.find(link.key, event.sequence_id)
            if found is not None:
                self._on_event(*found, event)
        if update.speed:
            lend_speeds(each.outlook for each in self._links.links)
        if len(self._queue) or self._hand_overs or update.introduced:
            self._turn_soon()

    def _tokens(self, worker: WorkerKey, tokens: Tokens) -> None:
        now_ns, there = self._clock.now_ns(), self._attempts.at(worker)
        for index, (sequence_id, token_id) in enumerate(zip(tokens.sequence_ids, tokens.ids, strict=True)):
            found = there.get(sequence_id)
            if found is not None:
                self._token(*found, token_id, tokens.logprobs.get(index), now_ns)

    def _token(
        self, generation: Generation, attempt: Attempt, token_id: int, logprob: Logprob | None, now_ns: int
    ) -> None:
        if generation.pooled:
            return  # an older worker generates instead of pooling, and ends without a vector
        if generation.early is not None and keep_back(generation, EarlyNews(attempt, token_id, logprob)):
            return
        ended = generation.token(token_id, logprob, now_ns)
        attempt.tokens += 1
        if len(generation.output) == 1:
            self.suspects.computed(generation)
            if not generation.resumed:
                self._learn(generation, attempt.worker)
        if generation.trial is not None and self.suspects.token(generation):
            self._turn_soon()
        if attempt.tokens == 1 and attempt is generation.placement.decode_attempt:
            self._carry_out(generation, generation.placement.first_decoded())
        if ended is not None:
            self._end(generation, ended)

    def _pooled(self, generation: Generation, attempt: Attempt, event: Prefilled | SequenceFinished) -> None:
        """End a choice with the vector of its prompt. If its worker computed none, send the choice elsewhere."""
        placement = generation.placement
        vector = event.vector if isinstance(event, SequenceFinished) else b""
        if not vector or len(vector) % 4:
            why = "its worker made no vector"
            self._carry_out(generation, placement.failed(attempt, why, self, blocks_lost=False, complete=False))
            return
        generation.vector = vector
        generation.timeline.token(self._clock.now_ns())
        self.suspects.computed(generation)
        if not generation.resumed:
            generation.cached_tokens = event.cached_tokens
            self._learn(generation, attempt.worker)
        self._carry_out(generation, placement.finished(attempt, self, well=True, complete=False), ApiFinishReason.STOP)

    def _learn(self, generation: Generation, worker: WorkerKey) -> None:
        """Compare the time of a first token with its prediction, to adjust later predictions for model and worker."""
        self._experience.first_token(generation)
        timeline, link = generation.timeline, self._links.link(worker)
        if link is not None:
            predicted_ns = timeline.predicted_first_ns - timeline.bound_ns
            link.outlook.slowness.answered(predicted_ns, timeline.first_token_ns - timeline.bound_ns)

    def _on_event(self, generation: Generation, attempt: Attempt, event: AttemptEvent) -> None:
        """Pass a worker's event to the choice's placement and carry out the resulting effects."""
        placement = generation.placement
        # A worker that refuses a decode has read no blocks, so another one can be reserved at once.
        refused = isinstance(event, SequenceRefused)
        if generation.early is not None and not refused and keep_back(generation, EarlyNews(attempt, event=event)):
            return
        complete = generation.complete() is not None
        if isinstance(event, KvOpened):
            left = 0 if complete else generation.max_output_tokens - attempt.known
            effects = placement.opened_blocks(attempt, event.blocks, self, len(generation.output), left)
            self._carry_out(generation, effects)
        elif generation.pooled and isinstance(event, Prefilled | SequenceFinished):
            self._pooled(generation, attempt, event)
        elif isinstance(event, Prefilled):
            self._prefilled(generation, event, complete=complete)
        elif isinstance(event, SequenceFinished):
            if attempt is placement.prompt_attempt and not placement.resumed:
                generation.cached_tokens = event.cached_tokens
            effects = placement.finished(attempt, self, well=event.reason is not None, complete=complete)
            self._carry_out(generation, effects, event.reason)
        elif isinstance(event, SequenceHandedOver):
            if attempt is placement.prompt_attempt and not placement.resumed:
                generation.cached_tokens = event.cached_tokens
            self._hand_overs.forget(generation)
            effects = placement.handed_over(attempt, event.blocks, self, len(generation.output), complete=complete)
            self._carry_out(generation, effects)
        elif isinstance(event, HandOverWanted):
            self._hand_overs.add(generation, attempt, self._next_id())
        else:
            self._fails(generation, attempt, event, complete=complete)

    def _prefilled(self, generation: Generation, event: Prefilled, *, complete: bool) -> None:
        placement = generation.placement
        if not placement.resumed:
            generation.cached_tokens = event.cached_tokens
        self._carry_out(generation, placement.prefilled(event.blocks, self, len(generation.output), complete=complete))
        for news in early_news(generation):
            if news.event is None:
                self._token(generation, news.attempt, news.token_id, news.logprob, self._clock.now_ns())
            else:
                self._on_event(generation, news.attempt, cast(AttemptEvent, news.event))

    def _fails(
        self, generation: Generation, attempt: Attempt, event: SequenceRefused | Failed, *, complete: bool
    ) -> None:
        placement = generation.placement
        if isinstance(event, SequenceRefused):
            self._carry_out(generation, placement.refused(attempt, event.why, event.detail, self, complete=complete))
            return
        code = event.code
        log.info("sequence failed", request_id=generation.request_id, worker=attempt.worker[0], code=code)
        detail, blocks_lost = f"{code}: {event.detail}", event.blocks_lost
        self._carry_out(generation, placement.failed(attempt, detail, self, blocks_lost=blocks_lost, complete=complete))

    def lost(self, link: Link, *, silent: bool, died: bool) -> None:
        """Reroute the choices on a worker whose stream broke."""
        there, reserved = self._attempts.leave(link.key)
        if died:
            self.suspects.lost(link.key, there)
        for generation in reserved:
            generation.placement.reservation_lost()
        for generation, attempt in there:
            complete = generation.complete() is not None
            self._carry_out(generation, generation.placement.lost(attempt, self, silent=silent, complete=complete))
        if reserved:
            log.info("decode credits lost with a worker", worker=link.id, choices=len(reserved))
        self._links.drop_gone()
        self._turn_soon()

    def unreachable(self, link: Link) -> None:
        """End the choices whose prompt is condemned because the worker of a broken stream cannot be reached again."""
        for generation in self.suspects.died(link.key, self._live):
            self._end(generation, poison_error())

    # ------------------------------------------------------------ effects of placements

    def partner(self, worker: WorkerKey) -> Partner | None:
        """Return the worker as the destination of a KV hand-off, or None while it cannot be reached."""
        link = self._links.link(worker)
        return None if link is None else link.partner()

    def decodes(self, model: str, kv_kind: str) -> bool:
        """Return whether any worker of the model could take over blocks of this kind, regardless of its credits."""
        return serves_decode(self._links.views(), model, kv_kind)

    def _carry_out(self, generation: Generation, effects: Effects, reason: ApiFinishReason | None = None) -> None:
        # `reason` is the finish reason that a worker sent, if it sent one.
        for effect in effects:
            if isinstance(effect, Requeue):
                tokens = len(generation.output)
                log.info("request requeued", request_id=generation.request_id, why=effect.why, tokens=tokens)
                self._wait(generation)
            elif isinstance(effect, End):
                self._end(generation, generation.outcome(effect, reason))
            else:
                self._attempts.carry_out(generation, effect)

    def _end(self, generation: Generation, ending: Ending) -> None:
        if generation.placement.ended:
            return
        self._queue.remove(generation)
        self.places.left(generation)
        self.suspects.ended(generation, well=isinstance(ending, ApiFinishReason))
        self._carry_out(generation, generation.placement.over())
        del self._live[generation]
        self._arrivals.ended(generation)
        if not self._live and self._on_idle is not None:
            self._on_idle()
        self._ended(generation, generation.conclude(ending))
        self._turn_soon()
