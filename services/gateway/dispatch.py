"""From the queue to workers and back: binds choices, follows them through both phases, sends them elsewhere on loss.

All sync and on the event loop: what is decided here leaves with the links' next frames.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count

import structlog

from libs.contracts.errors import FulcrumError, InvalidRequest, NoWorkers, SequenceFailed
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import ModelQueue
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import Logprob
from libs.policy.gateway.readiness import serves_decode
from libs.policy.gateway.view import Binding
from libs.runtime.clock import Clock
from services.gateway.fleet import Fleet
from services.gateway.frames import Tokens, read_tokens
from services.gateway.generation import Ending, FinishReason, Generation, Leg
from services.gateway.link import WorkerLink
from services.gateway.moves import OTHER_ROLE, Moves, count_reroute
from services.gateway.outlook import lend_speeds
from services.gateway.queues import model_queues
from services.gateway.release import forget_prompt, give_up_blocks, release
from services.gateway.router import Router
from services.gateway.suspects import Suspects, poison_error
from services.gateway.waiting import RETRY_AFTER_S, WaitingQueue, expired

log = structlog.get_logger()

EXPIRY_INTERVAL_S = 0.1
STOPPING = "this gateway is stopping"
_FINISHED = {pb.FINISH_REASON_STOP: FinishReason.STOP, pb.FINISH_REASON_LENGTH: FinishReason.LENGTH}

Ended = Callable[[Generation, Ending], None]
"""Called once for every choice."""


class Dispatcher:
    """Owns every choice from `submit` until it has ended."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        router: Router,
        clock: Clock,
        ended: Ended,
        max_waiting: int,
        max_wait_ms: int,
        no_workers_wait_ms: int,
        max_reroutes: int,
        suspects: Suspects,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._clock = clock
        self._ended = ended
        self._max_wait_ms = max_wait_ms
        self._no_workers_wait_ms = no_workers_wait_ms
        self._max_reroutes = max_reroutes
        self._queue = WaitingQueue(max_waiting)
        self._moves = Moves()
        self._suspects = suspects
        self._live: dict[int, Generation] = {}
        self._turns = count(1)
        self._turn_is_due = False
        self._draining = False
        self._idle = asyncio.Event()

    # ------------------------------------------------------------ for those who ask

    @property
    def waiting(self) -> int:
        """Choices in the queue."""
        return len(self._queue)

    @property
    def people_waiting(self) -> int:
        """Choices in the queue that are no lines of batch jobs."""
        return len(self._queue) - self._queue.batch

    def queues(self) -> list[ModelQueue]:
        """What waits, by model and phase."""
        return model_queues(self._queue, self._fleet.views()) if len(self._queue) else []

    @property
    def live(self) -> int:
        """Choices that have not ended, waiting ones included."""
        return len(self._live)

    @property
    def draining(self) -> bool:
        """Whether it takes no more."""
        return self._draining

    def check_room(self, count: int) -> None:
        """Raises QueueFull when the queue cannot take `count` more choices, NoWorkers when this gateway stops."""
        if self._draining:
            raise NoWorkers(STOPPING, retry_after_s=RETRY_AFTER_S)
        self._queue.check_room(count, self._clock.now_ns())

    def submit(self, generations: Sequence[Generation]) -> None:
        """Take the choices of one request, all or none; raises as `check_room` does, and PoisonRequest."""
        self.check_room(len(generations))
        self._suspects.admit(generations)
        for generation in generations:
            self._live[generation.number] = generation
            self._wait(generation)

    def cancel(self, generation: Generation, because: FulcrumError | None) -> None:
        """Free what it holds on workers: its client has gone (None), or another choice of its request has failed.

        Does nothing when it has ended, or was never submitted.
        """
        if generation.number in self._live:
            self._end(generation, because)

    async def drain(self, timeout_s: float) -> None:
        """Take no more, let what is alive end, and fail what has not ended in time."""
        self._draining = True
        if self._live:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
        for generation in list(self._live.values()):
            self._end(generation, NoWorkers(STOPPING, retry_after_s=RETRY_AFTER_S))

    async def expire(self) -> None:
        """End those that have waited too long, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            now_ns = self._clock.now_ns()
            late = expired(
                self._queue,
                self._fleet.views() if len(self._queue) else [],
                now_ns=now_ns,
                drain_s=self._queue.drain_s(now_ns),
                max_wait_ms=self._max_wait_ms,
                no_workers_wait_ms=self._no_workers_wait_ms,
            )
            for generation, error in late:
                self._end(generation, error)
            for generation in self._suspects.overdue(self._live.values()):
                self._end(generation, poison_error())

    # ------------------------------------------------------------ binding

    def _wait(self, generation: Generation) -> None:
        generation.timeline.queued_ns = now_ns = self._clock.now_ns()
        self._queue.add(generation, now_ns)
        self._turn_soon()

    def _turn_soon(self) -> None:
        """Bind once for all that happens in this turn of the loop."""
        if not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        if len(self._queue) or self._moves:
            self._bind()
        demands: dict[str, pb.Demand] = {}
        for link in self._fleet.links:
            if link.model not in demands:
                demands[link.model] = self._queue.demand(link.model)
            link.set_demand(demands[link.model])

    def _bind(self) -> None:
        """Send what waits to where there is room."""
        links, now_ns = self._fleet.serving(), self._clock.now_ns()
        if self._moves:
            self._moves.place(links, self._fleet.views(), self._router, now_ns, hushed=self._fleet.hushed)
        if len(self._queue):
            waiting = [generation for generation in self._queue.in_order() if generation.may_start]
            if self._suspects:
                waiting = self._bind_suspects(waiting, links, now_ns)
            self._bind_these(waiting, links, now_ns)

    def _bind_suspects(self, waiting: list[Generation], links: dict[str, WorkerLink], now_ns: int) -> list[Generation]:
        """Each that is to be apart by itself, where it may go, then all others on trial; gives the rest."""
        suspects = self._suspects
        for generation in filter(suspects.apart, waiting):
            if not suspects.held_back(generation, self._live.values(), now_ns):
                self._bind_these([generation], links, now_ns, barred=suspects.barred(generation, now_ns))
        on_trial = [each for each in waiting if each.trial is not None and not suspects.apart(each)]
        self._bind_these(on_trial, links, now_ns, avoided=suspects.taken())
        return [generation for generation in waiting if generation.trial is None]

    def _bind_these(
        self,
        waiting: Sequence[Generation],
        links: dict[str, WorkerLink],
        now_ns: int,
        *,
        avoided: frozenset[str] = frozenset(),
        barred: frozenset[str] = frozenset(),
    ) -> None:
        """Where there is room; on workers of `avoided` only where there is none on others, on those of `barred` not."""
        views, hushed = self._fleet.views(), self._fleet.hushed | avoided
        strand = partial(release, keep_kv=False)
        bindings = self._router.round(waiting, views, now_ns, hushed=hushed, strand=strand, barred=barred)
        for binding in bindings:
            self._start(self._live[binding.key], binding, links, now_ns)

    def _start(self, generation: Generation, binding: Binding, links: dict[str, WorkerLink], now_ns: int) -> None:
        self._queue.bound(generation, now_ns)
        generation.timeline.bound(now_ns, binding.predicted.ttft_ns)
        decode_link = links[binding.decode_worker]
        decode_link.outlook.turn = turn = next(self._turns)
        decode_link.reserve(generation)
        if binding.prompt_worker is None:
            self._decode(generation)
            return
        generation.recomputes += bool(generation.output)
        links[binding.prompt_worker].outlook.turn = turn
        generation.prefill_worker = binding.prompt_worker
        if binding.prompt_worker == binding.decode_worker:
            generation.decode_worker = binding.decode_worker
            generation.prompt_leg = decode_link.submit(generation, pb.PHASE_BOTH)
        else:
            generation.prompt_leg = links[binding.prompt_worker].submit(generation, pb.PHASE_PREFILL)

    def _decode(self, generation: Generation) -> None:
        """Second phase, on the worker whose credit is held; back to the queue for another one if there is none."""
        link = generation.reserved
        if link is None or not link.takes(pb.PHASE_DECODE) or link.kv_kind != generation.kv_kind:
            has_left = link is not None and not link.takes(pb.PHASE_DECODE)
            self._reroute(generation, "its decode worker takes no more work", keep_kv=True, bounced=has_left)
            return
        generation.decode_worker = link.id
        generation.decode_leg = link.submit(generation, pb.PHASE_DECODE)

    # ------------------------------------------------------------ what workers say

    def received(self, link: WorkerLink, frame: pb.WorkerFrame) -> None:
        """Tokens first, then events; credits and role news may let waiting choices go."""
        if frame.HasField("worker"):
            self._suspects.returned(link)  # and the turn below is for what waited for it
        tokens = read_tokens(frame)
        if tokens:
            self._tokens(link, tokens)
        for event in frame.events:
            leg = link.legs.get(event.sequence)
            if leg is not None:
                self._event(leg, event)
        if frame.HasField("speed"):
            lend_speeds(each.outlook for each in self._fleet.links)
        if len(self._queue) or self._moves or frame.HasField("worker"):
            self._turn_soon()

    def _tokens(self, link: WorkerLink, tokens: Tokens) -> None:
        now_ns = self._clock.now_ns()
        for index, (sequence, token_id) in enumerate(zip(tokens.sequences, tokens.ids, strict=True)):
            leg = link.legs.get(sequence)
            if leg is not None:
                self._token(leg, token_id, tokens.logprobs.get(index), now_ns)

    def _token(self, leg: Leg, token_id: int, logprob: Logprob | None, now_ns: int) -> None:
        generation = leg.generation
        ended = generation.token(token_id, logprob, now_ns)
        leg.tokens += 1
        if generation.trial is not None and self._suspects.token(generation):
            self._turn_soon()
        if leg is generation.decode_leg and leg.tokens == 1:
            # Its blocks have arrived and their sender was told so: nothing is left to free there.
            forget_prompt(generation, abort=False)
            generation.kv = None
        if ended is not None:
            self._end(generation, ended)

    def _event(self, leg: Leg, event: pb.SequenceEvent) -> None:
        match event.WhichOneof("event"):
            case "kv_opened":
                self._opened(leg, event.kv_opened.kv)
            case "prefilled":
                self._prefilled(leg, event.prefilled)
            case "leaving":
                self._moves.ask(leg)
            case "moved":
                self._moves.handed_over(leg, event.moved)
                self._decode(leg.generation)
            case "finished":
                self._finished(leg, event.finished)
            case "refused":
                self._refused(leg, event.refused)
            case "failed":
                self._failed(leg, event.failed)
            case _:  # kv_pulling fixes the decode worker, which only changes on refusal or loss anyway
                pass

    def _opened(self, leg: Leg, source: pb.KvSource) -> None:
        """Let the decode worker pull blocks while the prompt is computed; one that cannot is asked afterwards."""
        generation = leg.generation
        link = generation.reserved
        worker = link.worker if link else None
        if link is None or worker is None or not generation.prefilling:
            return
        streams = link.takes(pb.PHASE_DECODE) and worker.capabilities.streams_kv
        fits = streams and link.kv_kind == leg.link.kv_kind and not leg.link.kv_once
        ends_with_first = generation.max_output_tokens - leg.known <= 1 or generation.complete() is not None
        if not fits or ends_with_first:
            return
        generation.kv_open = source
        generation.decode_worker = link.id
        generation.decode_leg = link.submit(generation, pb.PHASE_DECODE)

    def _prefilled(self, leg: Leg, prefilled: pb.Prefilled) -> None:
        generation = leg.generation
        if not generation.resumed:
            generation.cached_tokens = prefilled.cached_tokens
        reason = generation.complete()
        if reason is not None:
            self._end(generation, reason)
            return
        generation.left(prefilled.kv, leg.link)
        pulling = generation.decode_leg
        if pulling is None:
            self._decode(generation)
        else:
            pulling.link.proceed(pulling, generation.output[pulling.known :])

    def _finished(self, leg: Leg, finished: pb.Finished) -> None:
        generation = leg.generation
        if leg is generation.prompt_leg and not generation.resumed:
            generation.cached_tokens = finished.cached_tokens
        leg.drop()
        reason = _FINISHED.get(finished.reason)
        if reason is None:
            self._restart(generation, "its worker ended it", keep_kv=False)
        else:
            self._end(generation, reason)

    def _refused(self, leg: Leg, refused: pb.Refused) -> None:
        generation = leg.generation
        leg.drop()
        if refused.code == pb.REFUSAL_CODE_INVALID:
            self._end(generation, InvalidRequest(f"worker {leg.link.id} refused: {refused.detail}"))
            return
        generation.avoid.add(leg.link.id)
        bounced = refused.code in OTHER_ROLE
        self._restart(generation, refused.detail, keep_kv=leg.phase == pb.PHASE_DECODE, bounced=bounced)

    def _failed(self, leg: Leg, failed: pb.Failed) -> None:
        generation = leg.generation
        known = failed.code in pb.FailureCode.values()
        code = pb.FailureCode.Name(failed.code) if known else f"failure code {failed.code}"
        log.info("sequence failed", request_id=generation.request_id, worker=leg.link.id, code=code)
        leg.drop()
        # Blocks that do not come are their source's fault: computed there again, they might never come.
        source = (generation.kv or generation.kv_open) if failed.code == pb.FAILURE_CODE_KV_LOST else None
        generation.avoid.add(source.worker_id if source else leg.link.id)
        self._restart(generation, f"{code}: {failed.detail}", keep_kv=False)

    def lost(self, link: WorkerLink, legs: list[Leg], reserved: list[Generation], *, silent: bool, died: bool) -> None:
        """A stream broke. Blocks that still wait at a prefill worker serve another decode worker, if more than one can
        read them.

        A pull from a worker that died ends by itself, with or without the blocks. From a silent one it would hang.
        """
        if died:
            self._suspects.lost(link, legs)
        for leg in legs:
            generation = leg.generation
            pulled = leg is generation.prompt_leg and generation.decode_leg is not None and not generation.prefilling
            carries_on = pulled and not silent
            if pulled and silent:
                generation.kv = None
            if leg is generation.decode_leg and generation.kv_given:
                give_up_blocks(generation)
            leg.drop()
            if generation in self._queue:  # for a decode worker: its blocks are gone
                generation.kv = None
            elif not carries_on:
                self._restart(generation, f"worker {link.id} was lost", keep_kv=generation.kv is not None)
        if reserved:
            log.info("decode credits lost with a worker", worker=link.id, choices=len(reserved))
        self._fleet.drop_gone()
        self._turn_soon()

    def unreachable(self, link: WorkerLink) -> None:
        """The worker of a broken stream is not there any more, or another one is in its place."""
        for generation in self._suspects.died(link, self._live.values()):
            self._end(generation, poison_error())

    # ------------------------------------------------------------ elsewhere, and the end

    def _restart(self, generation: Generation, why: str, *, keep_kv: bool, bounced: bool = False) -> None:
        """A leg has ended before its time. While the other one computes the prompt nothing is lost: it decides."""
        if not generation.prefilling:
            self._reroute(generation, why, keep_kv=keep_kv, bounced=bounced)

    def _reroute(self, generation: Generation, why: str, *, keep_kv: bool, bounced: bool = False) -> None:
        """Back to the head of the queue, with prompt and tokens so far; `bounced`: off another role."""
        if generation.ended or generation in self._queue:
            return
        whole = generation.complete()
        if whole is not None:  # only the news of its end was lost
            self._end(generation, whole)
            return
        count_reroute(generation, bounced=bounced)
        if generation.reroutes > self._max_reroutes:
            message = f"gave up after {self._max_reroutes} attempts elsewhere: {why}"
            self._end(generation, SequenceFailed(message, retry_after_s=RETRY_AFTER_S))
            return
        log.info("request goes elsewhere", request_id=generation.request_id, why=why, tokens=len(generation.output))
        keep_kv = keep_kv and serves_decode(self._fleet.views(), generation.model, generation.kv_kind)
        release(generation, keep_kv=keep_kv)
        self._wait(generation)

    def _end(self, generation: Generation, outcome: Ending) -> None:
        if generation.ended:
            return
        generation.ended = True
        self._queue.remove(generation)
        self._suspects.ended(generation, well=isinstance(outcome, FinishReason))
        release(generation, keep_kv=False)
        del self._live[generation.number]
        if not self._live and self._draining:
            self._idle.set()
        self._ended(generation, generation.conclude(outcome))
        self._turn_soon()
