"""The dispatcher's links to workers in virtual time, with records instead of gRPC streams."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from libs.dispatch.generation import Generation
from libs.dispatch.ports import LinkListener, Prefilled, QueuedDemand, Tokens, Work, WorkerUpdate
from libs.engine.kv_blocks import HANDLE_BYTES
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EnginePhase
from libs.lab.cluster.sequence import GREEDY, Coasted, CountedRequest, CountedTokens, ToGateway, ToWorker
from libs.lab.cluster.time import PS_PER_NS, VirtualTime
from libs.lab.cluster.worker import LabWorker
from libs.policy.gateway.outlook import CreditBalance, SubmitLoad, WorkerOutlook
from libs.policy.gateway.placement import Attempt, Blocks, Partner, WorkerKey
from libs.policy.gateway.view import WorkerView
from libs.policy.roles import Assignment, Phase, Role, serves

_PHASES: Final = {
    Phase.PREFILL: EnginePhase.PREFILL,
    Phase.DECODE: EnginePhase.DECODE,
    Phase.BOTH: EnginePhase.BOTH,
}
_CHAIN_ROOT: Final = b"lab"
_NAMES: Final = 1 << (8 * HANDLE_BYTES - 1)
"""A number above those of the handles that workers make; a worker holds no name of an earlier incarnation."""
_NOTHING: Final = WorkerUpdate(False, False, None, ())
_SPEED: Final = WorkerUpdate(False, True, None, ())


@dataclass(eq=False, slots=True)
class TracedGeneration(Generation):
    """A choice whose tokens are only counted."""

    output_tokens: int = 1
    keys: Sequence[bytes] = ()
    first_token_due_ns: int = 0
    tpot_target_ns: int = 0


@dataclass(slots=True)
class _Described:
    """The parts of a worker's frames that describe it, as last received."""

    id: str
    assignment: Assignment
    capabilities: Capabilities


class LabLink:
    """The link to one worker. Implements `libs.dispatch.ports.Link`."""

    def __init__(self, worker: LabWorker, listener: LinkListener, time: VirtualTime, tpot_ns: int) -> None:
        self.id = worker.id
        self.key: WorkerKey = (worker.id, worker.incarnation)
        self.outlook = WorkerOutlook("lab", worker.speed, worker.shape.kv_blocks, tpot_ns)
        self.prefill = CreditBalance()
        self.decode = CreditBalance()
        self.worker = worker
        self._listener = listener
        self._time = time
        self._hop_ps = worker.shape.hop_ns * PS_PER_NS
        self._described = _Described(worker.id, Assignment(worker.shape.model, Role.STANDBY, 0, 0), worker.capabilities)
        self._connected = False
        self._prompts: dict[int, bool] = {}
        """Sequences whose prompt is computed for another worker, and whether each is a batch line."""
        self._demand = QueuedDemand()
        self._next = ToWorker()
        self._due = False
        self._view: WorkerView | None = None
        self._names = 0

    # ------------------------------------------------------------ state

    @property
    def model(self) -> str:
        """The assigned model; empty before the worker has described itself."""
        return self._described.assignment.model if self._connected else ""

    @property
    def serving(self) -> bool:
        return self._connected

    @property
    def assignment(self) -> Assignment:
        """The assignment that the worker last reported."""
        return self._described.assignment

    def partner(self) -> Partner | None:
        """Return the worker as the KV destination of sequences that will decode there."""
        if not self._connected:
            return None
        takes = serves(self._described.assignment, Phase.DECODE)
        return Partner(takes, self.worker.shape.kv_kind, streams_kv=True, named_kv=True)

    def named_blocks(self, tokens: int) -> Blocks | None:
        """Return a new name for the blocks of a prompt that the worker would compute in its next step, else None."""
        if not self._connected or not self.outlook.begins_at_once(tokens):
            return None
        self._names += 1
        can = self.worker.capabilities
        handle = KvHandle(
            self.id,
            self.key[1],
            self.id,
            (_NAMES + self._names).to_bytes(HANDLE_BYTES, "big"),
            tokens,
            -(-tokens // can.block_size_tokens),
            can.kv_layout,
            streamed=True,
            named=True,
        )
        return Blocks(handle, self.id, self.worker.shape.kv_kind, once=False, named=True)

    def quiet(self, sequence_id: int) -> bool:
        # Workers in the lab never die unnoticed.
        return False

    def view(self) -> WorkerView:
        reported = self.worker.reported_load(self._time.now_ps - self._hop_ps)
        if reported is not None:
            self.outlook.on_load_report(*reported, self._time.now_ns())
            self._view = None
        if self._view is None:
            self._view = self.outlook.view(
                self._described,
                self.worker.shape.kv_kind,
                prefill_credits=self.prefill.free,
                decode_credits=self.decode.free,
                prompts=len(self._prompts),
                batch_prompts=sum(self._prompts.values()) if self._prompts else 0,
            )
        return self._view

    # ------------------------------------------------------------ content of the next frame

    def submit(self, attempt: Attempt, work: Work, blocks: Blocks | None) -> None:
        """Send work to the worker as specified in `libs.dispatch.ports.Link`."""
        generation = cast(TracedGeneration, work)
        sequence_id, phase = attempt.sequence_id, attempt.phase
        if phase is Phase.PREFILL:
            self.prefill.use()
            self._prompts[sequence_id] = work.batch
        else:
            self.decode.use_reserved()
            self.outlook.reserved(work.prompt_tokens, -1)
        if self.prefill.spent or self.decode.spent:
            self._return_credits()
        self.outlook.sent(sequence_id, SubmitLoad.of(work.tokens, work.cached_hints, self.id, phase))
        self._next.submits.append(_request(generation, attempt, blocks))
        self._changed()

    def proceed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Forward the tokens sampled where the prompt of a streamed sequence was computed."""
        self._next.proceeds.append((sequence_id, len(token_ids)))
        self._changed()

    def hand_over(self, sequence_id: int) -> None:
        """Order the hand-over of a running sequence."""
        self._next.hand_overs.append(sequence_id)
        self._changed()

    def forget(self, sequence_id: int, *, abort: bool) -> None:
        """Stop following a sequence, ending it at the worker if `abort`."""
        self._prompts.pop(sequence_id, None)
        self.outlook.ended(sequence_id)
        self._view = None
        if abort:
            self._next.aborts.append(sequence_id)
            self._changed()

    def reserve(self, prompt_tokens: int) -> None:
        self.decode.reserve()
        self.outlook.reserved(prompt_tokens)
        self._view = None

    def release(self, prompt_tokens: int) -> None:
        self.outlook.reserved(prompt_tokens, -1)
        self.decode.release()
        self._view = None
        self._return_credits()

    def set_demand(self, demand: QueuedDemand) -> None:
        """Send the size of the queue: at once if it changes who gets credits, otherwise with the next frame."""
        if demand == self._demand or not self._connected:
            return
        sent, self._demand = self._demand, demand
        self._next.demand = demand
        grown = demand.waiting >= 2 * sent.waiting or not demand.waiting
        if grown or demand.head_deadline_unix_ns < sent.head_deadline_unix_ns:
            self._changed()

    def _return_credits(self) -> None:
        prefill, decode = self.prefill.give_back(), self.decode.give_back()
        spent_prefill, spent_decode = self.prefill.take_spent(), self.decode.take_spent()
        if prefill or decode or spent_prefill or spent_decode:
            frame = self._next
            frame.returned_prefill += prefill
            frame.returned_decode += decode
            frame.spent_prefill += spent_prefill
            frame.spent_decode += spent_decode
            self._changed()

    def _changed(self) -> None:
        self._view = None
        if not self._due:
            self._due = True
            self._time.soon(self._send)

    def _send(self) -> None:
        self._due = False
        frame, self._next = self._next, ToWorker()
        self._time.at_ps(self._time.now_ps + self._hop_ps, lambda: self._arrive(frame))

    def _arrive(self, frame: ToWorker) -> None:
        # A frame sent to an earlier incarnation never reaches a later one.
        if self.worker.incarnation == self.key[1]:
            self.worker.receive(frame)

    def broken(self) -> None:
        self._connected = False

    # ------------------------------------------------------------ frames from the worker

    def take(self, frame: ToGateway) -> None:
        """Apply a frame's changes to credits, load and assignment."""
        self._view = None
        if frame.assignment is not None:
            self._described.assignment = frame.assignment
        introduced = not self._connected
        self._connected = True
        if frame.credit is not None:
            prefill_grant, prefill_recall, decode_grant, decode_recall = frame.credit
            self.prefill.recall(prefill_recall)
            self.decode.recall(decode_recall)
            self._return_credits()  # before the grant of the same frame, which must not be returned
            self.prefill.grant(prefill_grant)
            self.decode.grant(decode_grant)
        if frame.speed is not None:
            self.outlook.speed = frame.speed
        self.outlook.on_load_report(frame.load, frame.submits_taken, self._time.now_ns())
        for each in frame.events:
            if isinstance(each, Prefilled):
                self._prompts.pop(each.sequence_id, None)
        tokens = Tokens(frame.tokens, frame.tokens, {}) if frame.tokens else None
        update = WorkerUpdate(introduced or frame.assignment is not None, frame.speed is not None, tokens, frame.events)
        self._listener.received(self, update)

    def coasted(self, coasted: Coasted) -> None:
        """Apply the load after steps that passed at once; the gateway counts their tokens."""
        self._view = None
        if coasted.speed is not None:
            self.outlook.speed = coasted.speed
        self.outlook.on_load_report(coasted.load, coasted.submits_taken, self._time.now_ns())
        self._listener.received(self, _NOTHING if coasted.speed is None else _SPEED)


class LabLinks:
    """The links to all workers. Implements `libs.dispatch.ports.Links`."""

    quiet: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._links: dict[WorkerKey, LabLink] = {}
        self._by_id: dict[str, LabLink] = {}

    def add(self, link: LabLink) -> None:
        self._links[link.key] = link
        self._by_id[link.id] = link

    def remove(self, link: LabLink) -> None:
        del self._links[link.key], self._by_id[link.id]

    @property
    def links(self) -> Iterable[LabLink]:
        return self._links.values()

    def link(self, key: WorkerKey) -> LabLink | None:
        return self._links.get(key)

    def serving(self) -> Mapping[str, LabLink]:
        """Return the links that accept work, by worker id."""
        return {link.id: link for link in self._links.values() if link.serving}

    def views(self) -> list[WorkerView]:
        """Return the state of the serving workers for binding."""
        return [link.view() for link in self._links.values() if link.serving]

    def drop_gone(self) -> None:
        # Links of lost workers are removed at once.
        ...


def _request(generation: TracedGeneration, attempt: Attempt, blocks: Blocks | None) -> CountedRequest:
    phase = _PHASES[attempt.phase]
    handle = cast(KvHandle, blocks.source) if blocks is not None else None
    return CountedRequest(
        sequence_id=attempt.sequence_id,
        request_id=generation.request_id,
        phase=phase,
        token_ids=CountedTokens(generation.tokens),  # type: ignore[arg-type]
        prompt_tokens=generation.prompt_tokens,
        max_output_tokens=generation.max_output_tokens,
        sampling=GREEDY,
        chain_root=_CHAIN_ROOT,
        kv=handle if phase is EnginePhase.DECODE else None,
        tpot_target_ns=generation.tpot_target_ns,
        first_token_due_ns=generation.first_token_due_ns,
        yields=generation.batch,
        kind=f"{generation.context.tenant}/{generation.context.service_class}",
        output_tokens=generation.output_tokens,
        keys=generation.keys,
        kv_name=handle.opaque if handle is not None and phase is EnginePhase.PREFILL else b"",
    )
