"""The lab's gateway: the live dispatcher over links in virtual time, fed by a trace."""

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from libs.contracts.errors import FulcrumError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.dispatcher import Bounds, Dispatcher
from libs.dispatch.generation import Ending, Generation, RequestTimes
from libs.dispatch.ports import Tenancy
from libs.dispatch.rounds import Router
from libs.dispatch.suspects import Suspects
from libs.lab.cluster.books import LabAnswer
from libs.lab.cluster.host.shape import InjectedErrors
from libs.lab.cluster.links import LabLink, LabLinks, TracedGeneration
from libs.lab.cluster.planner import BorrowedMover, LabPlanner, OnLook
from libs.lab.cluster.sequence import Coasted, CountedTokens, ToGateway
from libs.lab.cluster.time import PS_PER_NS, VirtualTime
from libs.lab.cluster.worker import LabWorker
from libs.lab.rivals.port import RivalMover, Slo
from libs.lab.traces.request import TraceRequest
from libs.policy.gateway.binding import RoutingPolicy
from libs.policy.gateway.order import WaitBounds
from libs.policy.gateway.placement import Attempt
from libs.policy.roles import Phase, serves

SUSPECTED_S = 60.0
_SAMPLING: Final = pb.Sampling()


class _Context(NamedTuple):
    """The parts of a request's context that the dispatcher reads."""

    ttft_deadline_unix_ns: int
    tenant: str
    service_class: str


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A rival's mover that replaces Fulcrum's planner."""

    mover: RivalMover
    slo: Slo
    """The latency targets of a request of mean lengths."""


class LabGateway:
    """A gateway that submits arriving requests to the live dispatcher."""

    def __init__(
        self,
        workers: Sequence[LabWorker],
        policy: RoutingPolicy,
        time: VirtualTime,
        *,
        patience: WaitBounds,
        max_waiting: int,
        tpot_ns: int = 0,
        planned: bool = False,
        borrowed: Borrowed | None = None,
        lookup_ns: int = 0,
        late_last: bool = True,
        wrong: InjectedErrors | None = None,
        on_look: OnLook | None = None,
        tenants: Tenancy | None = None,
    ) -> None:
        """- `tpot_ns`: the requests' target.
        - `planned`: whether a planner assigns roles. Otherwise they are fixed, or follow a rival's mover.
        - `on_look`: called with each of the planner's decisions.
        - `late_last`: whether the dispatcher knows the deadlines of first tokens.
        - `lookup_ns`: the delay of the block index, which applies where there is a choice of workers.
        - `tenants`: the tenants that share queue and decode places; None for no sharing.
        """
        self._tpot_ns = tpot_ns
        self._late_last = late_last
        self._wrong = wrong or InjectedErrors()
        self._time = time
        self._workers = workers
        self._lookup_ps = lookup_ns * PS_PER_NS
        self._links = LabLinks()
        self.dispatcher = Dispatcher(
            links=self._links,
            router=Router(policy),
            clock=time,
            scheduler=time,
            ended=self._ended,
            suspects=Suspects(time, SUSPECTED_S, self._quiet),
            bounds=Bounds(max_waiting, patience, max_reroutes=8),
            tenants=tenants,
        )
        for worker in workers:
            self._links.add(LabLink(worker, self.dispatcher, time, tpot_ns))
        self._by_worker = {link.worker.index: link for link in self._links.links}
        self.ended = 0
        self.handed_over = 0
        """The number of sequences that moved to another worker with their KV."""
        dispatcher = self.dispatcher
        self.planner = (
            LabPlanner(
                workers,
                time,
                lambda: dispatcher.hopeful_tokens,
                tpot_ns,
                held=self._held,
                later_ns=round(self._wrong.telemetry_ms * 1e6),
                on_look=on_look,
            )
            if planned
            else None
        )
        self._borrowed = (
            BorrowedMover(workers, time, borrowed.mover, borrowed.slo, self._waiting) if borrowed is not None else None
        )

    def start(self) -> None:
        """Start enforcing the bounds on waiting."""
        self.dispatcher.watch_time()
        if self.planner is not None:
            self.planner.start()
        if self._borrowed is not None:
            self._borrowed.start()

    def arrive(self, answer: LabAnswer, keys: Sequence[bytes], tpot_target_ns: int) -> None:
        arrived_ns = self._time.now_ns()
        if self._borrowed is not None:
            self._borrowed.arrived(answer)
        if self.planner is not None:
            self.planner.arrived(answer.ttft_limit_ns)

        def submit() -> None:
            generation = self._generation(answer, answer.request, keys, tpot_target_ns, arrived_ns)
            try:
                self.dispatcher.submit([generation])
            except FulcrumError as error:
                answer.fail(error)
                self.ended += 1

        # Shorter prompts have no full block to look up.
        looked_up = answer.request.input_tokens >= self._workers[0].shape.block_tokens
        if self._lookup_ps and looked_up and self._has_choice():
            self._time.in_ps(self._lookup_ps, submit)
        else:
            submit()

    def _has_choice(self) -> bool:
        """Return whether there is a choice of prefill or decode workers; without a choice the index is not
        consulted.
        """
        roles = [link.assignment for link in self._links.links if link.serving]
        prompts = sum(serves(role, Phase.PREFILL) or serves(role, Phase.BOTH) for role in roles)
        return prompts > 1 or sum(serves(role, Phase.DECODE) for role in roles) > 1

    def _generation(
        self, answer: LabAnswer, request: TraceRequest, keys: Sequence[bytes], tpot_target_ns: int, now_ns: int
    ) -> TracedGeneration:
        deadline_ns = now_ns + answer.ttft_limit_ns if self._late_last else 0
        return TracedGeneration(
            request_id=str(request.number),
            model=self._workers[0].shape.model,
            prompt=b"",
            prompt_tokens=request.input_tokens,
            max_output_tokens=answer.most_output_tokens,
            sampling=_SAMPLING,
            context=cast(Any, _Context(deadline_ns, request.tenant, request.service_class)),
            end_token_ids=frozenset(),
            sink=answer,
            timeline=RequestTimes(now_ns),
            output=cast(MutableSequence[int], CountedTokens(0)),
            cached_hints=self._cached(keys) | self._false_hint(request),
            fingerprint=request.number.to_bytes(8, "big"),
            output_tokens=request.output_tokens,
            keys=keys,
            first_token_due_ns=now_ns + answer.ttft_limit_ns,
            tpot_target_ns=tpot_target_ns,
        )

    def _cached(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return the prompt tokens whose KV each worker holds according to the block index."""
        if not keys:
            return {}
        every = list(keys)
        found = ((worker.id, worker.core.cached_tokens(every)) for worker in self._workers)
        return {worker_id: tokens for worker_id, tokens in found if tokens}

    def _held(self) -> tuple[int, int, float]:
        """Return the requests that wait only for a place to decode, their prompt tokens, and the mean length of all
        waiting prompts.
        """
        queues = self.dispatcher.queues()
        requests = sum(each.decode_requests for each in queues)
        tokens = sum(each.decode_prompt_tokens for each in queues)
        waiting = requests + sum(each.prefill_requests for each in queues)
        return requests, tokens, (tokens + sum(each.prefill_tokens for each in queues)) / max(waiting, 1)

    def _waiting(self) -> tuple[int, int]:
        """Return (number, tokens) of the prompts that wait in the gateway and can still be in time."""
        return self.dispatcher.waiting, self.dispatcher.hopeful_tokens

    def _false_hint(self, request: TraceRequest) -> dict[str, int]:
        named = self._wrong.hint(request.number, [worker.id for worker in self._workers]) if self._wrong.hints else ""
        return {named: request.input_tokens} if named else {}

    def _quiet(self, attempt: Attempt) -> bool:
        return False

    def _ended(self, generation: Generation, ending: Ending) -> None:
        answer = cast(LabAnswer, generation.sink)
        answer.cached_tokens = generation.cached_tokens
        answer.predicted_ttft_ns = generation.timeline.predicted_ttft_ns
        arrival_ns = generation.timeline.arrival_ns
        answer.likely_ttft_ns = tuple(each - arrival_ns for each in generation.timeline.likely_first_ns)
        answer.prefill_worker, answer.decode_worker = (
            generation.placement.prefill_worker,
            generation.placement.decode_worker,
        )
        if self._borrowed is not None:
            self._borrowed.ended(answer)
        self.handed_over += generation.placement.hand_overs
        self.ended += 1

    # ------------------------------------------------------------ callbacks from workers

    @property
    def heeds_tokens(self) -> bool:
        """Return whether choices are on trial, in which case a few tokens clear one and let those that wait for it
        proceed.
        """
        return bool(self.dispatcher.suspects)

    def deliver(self, worker: LabWorker, frame: ToGateway) -> None:
        if (link := self._by_worker.get(worker.index)) is not None:
            link.take(frame)

    def lost(self, worker: LabWorker) -> None:
        """Handle a worker whose stream broke and whose address does not answer."""
        link = self._by_worker.pop(worker.index)
        self._links.remove(link)
        link.broken()
        self.dispatcher.lost(link, silent=False, died=True)
        self.dispatcher.unreachable(link)
        if self.heeds_tokens:
            for other in self._workers:
                other.step_singly()

    def returned(self, worker: LabWorker) -> None:
        """Open a link to the worker, which then waits for its first frame."""
        link = self._by_worker[worker.index] = LabLink(worker, self.dispatcher, self._time, self._tpot_ns)
        self._links.add(link)

    def coasted(self, worker: LabWorker, coasted: Coasted) -> None:
        """Record the same number of tokens for each of these sequences."""
        link = self._by_worker.get(worker.index)
        if link is None:
            return
        there = self.dispatcher.attempts.at(link.key)
        delay_ps = worker.shape.hop_ns * PS_PER_NS
        last_ns = (coasted.coast.end_ps(coasted.steps) + delay_ps) // PS_PER_NS
        for sequence_id in coasted.sequences:
            found = there.get(sequence_id)
            if found is None:
                continue
            generation, attempt = found
            cast(CountedTokens, generation.output).count += coasted.steps
            attempt.tokens += coasted.steps
            generation.timeline.last_token_ns = last_ns
            cast(LabAnswer, generation.sink).coasted(coasted.coast, coasted.steps, delay_ps)
        link.coasted(coasted)
