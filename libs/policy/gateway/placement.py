"""The state machine of one sequence's location: queued, at a prefill worker, at a decode worker, or in transit.

Events go in and effects come out. `Dispatcher` and `Attempts` of libs/dispatch carry the effects out in order, and
nothing else changes the location of a sequence. At most one attempt computes the prompt or holds its blocks, and at
most one decodes. A decode credit stays reserved from binding until the sequence decodes there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from libs.policy.roles import Phase, Refusal

WorkerKey = tuple[str, int]
"""A worker's id and incarnation: a restarted worker is a different one."""


@dataclass(eq=False, slots=True)
class Attempt:
    """One submit of a sequence to a worker."""

    worker: WorkerKey
    sequence_id: int
    phase: Phase
    known: int
    """The number of output tokens that the attempt's submit carried."""
    tokens: int = 0
    """The output tokens generated on this worker."""


class Blocks(NamedTuple):
    """The KV blocks that a sequence leaves behind on its worker, or that the worker serves while it computes them."""

    # The data by which a decode worker finds the blocks; opaque here. The type must be quoted for mypyc.
    source: "object"
    worker_id: str
    kind: str
    """The kind of KV; workers of equal kind can exchange blocks."""
    once: bool
    """True if only one reader may ever pull the blocks."""
    named: bool = False
    """True if the gateway named the blocks before their prompt began. Sampled tokens then come with them."""


class Submit(NamedTuple):
    """The submission of an attempt to its worker, for a prompt credit or for the decode credit reserved there."""

    attempt: Attempt
    blocks: Blocks | None
    """The blocks to continue from, or, for a prompt's attempt, the blocks to leave under their name."""


class Forget(NamedTuple):
    """The end of the gateway's interest in an attempt.

    `abort` also ends it on its worker, or frees the blocks that it left there.
    """

    attempt: Attempt
    abort: bool


class Proceed(NamedTuple):
    """An attempt whose blocks, pulled during prefill, are now complete; it also receives the missing tokens."""

    attempt: Attempt


class HandOver(NamedTuple):
    """A running attempt that its worker should hand over to a reserved place elsewhere."""

    attempt: Attempt


class Reserve(NamedTuple):
    """A decode credit to reserve on a worker."""

    worker: WorkerKey


class Release(NamedTuple):
    """A reserved decode credit to free on a worker."""

    worker: WorkerKey


class Requeue(NamedTuple):
    """The return of the sequence to the gateway's queue."""

    why: str


class End(NamedTuple):
    """The end of the sequence, for one of the reasons below."""

    why: "EndReason"
    detail: str = ""


class EndReason(Enum):
    COMPLETE = auto()
    REFUSED = auto()  # refused by a worker as invalid
    GAVE_UP = auto()  # after too many reroutes


WorkerEffect = Submit | Forget | Proceed | HandOver | Reserve | Release
"""The effects carried out on a worker; `Submit` and `Forget` also change the set of known attempts."""
Effect = WorkerEffect | Requeue | End
Effects = Sequence[Effect]
NOTHING: Final[Effects] = ()


MAX_HAND_OVERS: Final = 32
"""The maximum number of hand-overs of one sequence. After that it stays on its worker."""
MAX_STALE_ROLE_RETRIES: Final = 256
"""The bound on retries of one sequence because a worker's role had changed. Further ones count as failures, so that a
worker that always refuses does not keep it going forever.
"""
# Refusals by a worker that has another role than the gateway knew, or that is leaving.
OTHER_ROLE: Final = (Refusal.STALE_ROLE, Refusal.DRAINING)


@dataclass(frozen=True, slots=True)
class Partner:
    """A worker as the target of a hand-over or a decode."""

    takes_decode: bool
    kv_kind: str
    streams_kv: bool
    named_kv: bool = False


class KnownWorkers(Protocol):
    """The current state of the workers, as far as placement needs it."""

    max_reroutes: int
    """The number of times a sequence may be rerouted after failures."""

    def partner(self, worker: WorkerKey) -> Partner | None:
        """Return the worker, or None if it cannot be reached."""
        ...

    def decodes(self, model: str, kv_kind: str) -> bool:
        """Return whether some worker of the model can take over blocks of this kind, regardless of credits."""
        ...


@dataclass(eq=False, slots=True)
class Placement:
    """The location of one sequence.

    Each method takes an event and returns its effects. `complete` means that the output is complete.
    """

    model: str
    # Id of its next attempts. It changes with every wait and hand-over, so that no worker receives an id twice.
    sequence_id: int = 0
    prompt_attempt: Attempt | None = None
    """The attempt that computes the prompt, or holds its blocks."""
    decode_attempt: Attempt | None = None
    reserved: WorkerKey | None = None
    """The worker with a decode credit reserved for the sequence."""
    blocks: Blocks | None = None
    """The complete blocks that wait at the prompt's worker for a decode worker."""
    streamed_blocks: Blocks | None = None
    """The blocks that can be read while the prompt is being computed."""
    waiting: bool = False
    ended: bool = False
    reroutes: int = 0
    """The number of times the sequence moved because a worker failed."""
    stale_role_retries: int = 0
    """The number of retries because a worker's role had changed, which do not count as failures."""
    hand_overs: int = 0
    """The number of times the sequence moved with its KV because its worker took another role."""
    given_up: int = 0
    """The number of times the sequence gave up its place to another tenant."""
    handing_over: bool = False
    """True if the worker was asked to hand the sequence over. A worker that cannot move the KV ends the attempt."""
    recomputes: int = 0
    """The number of times the prompt was computed again after the first token."""
    blocks_read: bool = False
    """True if the decode worker may have read all blocks before the prompt's worker has reported them."""
    decode_left: bool = False
    """True if the decode worker refused the sequence for its role while the prompt was still being computed."""
    avoid: set[str] = field(default_factory=set)
    """The ids of workers that have failed the sequence."""
    prefill_worker: str = ""
    """The id of the worker that computed the prompt last."""
    decode_worker: str = ""
    """The id of the worker that decodes; empty before a decode is sent."""

    # ------------------------------------------------------------ state

    @property
    def prefilling(self) -> bool:
        """Return whether a worker computes the prompt for another one, which may already be pulling blocks."""
        return self.prompt_attempt is not None and self.prompt_attempt.phase is Phase.PREFILL and self.blocks is None

    @property
    def blocks_given(self) -> bool:
        """Return whether a decode worker has been given blocks that only one reader may pull.

        It may read them at any time until it reports that the sequence has ended there.
        """
        return self.blocks is not None and self.blocks.once and self.decode_attempt is not None

    @property
    def resumed(self) -> bool:
        """Return whether the sequence was bound before and lost its worker, or its place there."""
        return bool(self.reroutes or self.stale_role_retries or self.given_up)

    @property
    def runs(self) -> bool:
        """Return whether one worker decodes the sequence and no part of it is in transit to another."""
        attempt = self.decode_attempt or self.prompt_attempt
        apart = self.blocks is not None or self.reserved is not None or self.handing_over
        return attempt is not None and attempt.phase is not Phase.PREFILL and attempt.tokens > 0 and not apart

    # ------------------------------------------------------------ going to workers

    def queued(self, sequence_id: int) -> None:
        """Record that the sequence waits for workers; its next attempts use this id."""
        self.sequence_id, self.waiting = sequence_id, True

    def bound(
        self, prompt: WorkerKey | None, decode: WorkerKey, output_tokens: int, named: Blocks | None = None
    ) -> Effects:
        """Start the sequence on the bound workers. Without `prompt`, its computed blocks wait already.

        With `named`, the decode worker gets its submit together with the prompt's worker, and waits for these blocks.
        """
        self.waiting = self.decode_left = self.blocks_read = False
        self.reserved = decode
        if prompt is None:
            return [Reserve(decode), self._submit_decode(decode, self.blocks, output_tokens)]
        self.recomputes += output_tokens > 0
        self.prefill_worker = prompt[0]
        phase = Phase.PREFILL
        if prompt == decode:
            phase, self.reserved, self.decode_worker = Phase.BOTH, None, decode[0]
        self.prompt_attempt = Attempt(prompt, self.sequence_id, phase, output_tokens)
        if named is None or phase is Phase.BOTH:
            return [Reserve(decode), Submit(self.prompt_attempt, None)]
        self.streamed_blocks = named
        submit = Submit(self.prompt_attempt, named)
        return [Reserve(decode), submit, self._submit_decode(decode, named, output_tokens)]

    def bound_to_prompt(self, worker: WorkerKey) -> Effects:
        """Start a sequence that ends with its prompt, and that no worker decodes."""
        self.waiting, self.prefill_worker = False, worker[0]
        self.prompt_attempt = Attempt(worker, self.sequence_id, Phase.PREFILL, 0)
        return [Submit(self.prompt_attempt, None)]

    def _submit_decode(self, worker: WorkerKey, blocks: Blocks | None, output_tokens: int) -> Submit:
        """Return the submit that uses the reserved decode credit."""
        self.reserved, self.decode_worker = None, worker[0]
        self.decode_attempt = Attempt(worker, self.sequence_id, Phase.DECODE, output_tokens)
        return Submit(self.decode_attempt, blocks)

    def opened_blocks(
        self, attempt: Attempt, blocks: Blocks, cluster: KnownWorkers, output_tokens: int, left: int
    ) -> Effects:
        """Start the decode attempt on blocks that can be read during prefill.

        `left` is the maximum number of tokens to come. A decode worker that cannot stream blocks of this kind gets its
        submit after the prefill.
        """
        worker = self.reserved
        partner = cluster.partner(worker) if worker is not None else None
        if worker is None or partner is None or not self.prefilling or attempt is not self.prompt_attempt:
            return NOTHING
        reads = partner.takes_decode and partner.streams_kv and partner.kv_kind == blocks.kind and not blocks.once
        if not reads or left <= 1:
            return NOTHING
        self.streamed_blocks = blocks
        return [self._submit_decode(worker, blocks, output_tokens)]

    def prefilled(self, blocks: Blocks, cluster: KnownWorkers, output_tokens: int, *, complete: bool) -> Effects:
        """Continue after the prefill, with the blocks waiting. If `complete`, the first token was the last."""
        if complete:
            return self.end(EndReason.COMPLETE)
        named = self.streamed_blocks is not None and self.streamed_blocks.named
        self.blocks, self.streamed_blocks = blocks, None
        if self.decode_attempt is not None:
            return NOTHING if named else [Proceed(self.decode_attempt)]
        return self._go_on(cluster, output_tokens, complete=False)

    def _go_on(self, cluster: KnownWorkers, output_tokens: int, *, complete: bool) -> Effects:
        """Start the decode attempt on the reserved worker, or requeue the sequence if that worker cannot take it."""
        worker, blocks = self.reserved, self.blocks
        partner = cluster.partner(worker) if worker is not None else None
        takes = partner is not None and partner.takes_decode
        if worker is None or partner is None or blocks is None or not takes or partner.kv_kind != blocks.kind:
            has_left = self.decode_left or (worker is not None and not takes)
            why = "its decode worker takes no more work"
            keep = not self.blocks_read
            return self._reroute(why, cluster, keep_blocks=keep, stale_role=has_left, complete=complete)
        return [self._submit_decode(worker, blocks, output_tokens)]

    def note_blocks_read(self) -> None:
        """Record that the decode worker may have read all blocks, which their sender then frees."""
        self.blocks_read = True

    def first_decoded(self) -> Effects:
        """Forget the prompt's attempt after the first decoded token."""
        self.blocks, self.blocks_read = None, False  # the blocks have arrived, and their sender has noticed
        return self._forget_prompt(abort=False)

    # ------------------------------------------------------------ hand-overs

    def hands_over(self, attempt: Attempt, sequence_id: int) -> bool:
        """Return whether to look for a place, under the new id, for an attempt that its worker wants to hand over.

        A worker repeats the request with each role change. Return False if a place is already reserved.
        """
        runs = attempt in (self.prompt_attempt, self.decode_attempt) and self.blocks is None
        if not runs or self.reserved is not None or self.hand_overs >= MAX_HAND_OVERS:
            return False
        self.sequence_id = sequence_id
        return True

    def place_found(self, attempt: Attempt, worker: WorkerKey) -> Effects:
        """Reserve a place on the worker that takes the sequence over from the worker of `attempt`."""
        self.reserved, self.handing_over = worker, True
        return [Reserve(worker), HandOver(attempt)]

    def handed_over(
        self, attempt: Attempt, blocks: Blocks, cluster: KnownWorkers, output_tokens: int, *, complete: bool
    ) -> Effects:
        """Continue elsewhere after the worker has handed the attempt over.

        The attempt then represents the blocks that it left, as a prompt's attempt does.
        """
        forget = self._forget_prompt(abort=True) if attempt is not self.prompt_attempt else NOTHING
        self.prompt_attempt, self.decode_attempt = attempt, None
        self.blocks, self.streamed_blocks, self.handing_over = blocks, None, False
        self.blocks_read = False  # these blocks are new, and no worker has been given them
        self.hand_overs += 1
        return [*forget, *self._go_on(cluster, output_tokens, complete=complete)]

    # ------------------------------------------------------------ ends reported by workers

    def finished(self, attempt: Attempt, cluster: KnownWorkers, *, well: bool, complete: bool) -> Effects:
        """End or restart the sequence after its worker has finished the attempt.

        `well` is False if the worker ended it without its KV during a hand-over, or without a reason.
        """
        handing_over, drop = self.handing_over, self._drop(attempt)
        if well:
            return [*drop, *self.end(EndReason.COMPLETE)]
        why = "its worker took another role" if handing_over else "its worker ended it"
        return [*drop, *self._restart(why, cluster, keep_blocks=False, stale_role=handing_over, complete=complete)]

    def refused(
        self, attempt: Attempt, why: Refusal | None, detail: str, cluster: KnownWorkers, *, complete: bool
    ) -> Effects:
        """End or restart the sequence after a worker has refused the attempt. `why` is None if its code is unknown."""
        drop = self._drop(attempt)
        if why is Refusal.INVALID:
            return [*drop, *self.end(EndReason.REFUSED, f"worker {attempt.worker[0]} refused: {detail}")]
        self.avoid.add(attempt.worker[0])
        keep, stale_role = attempt.phase is Phase.DECODE, why in OTHER_ROLE
        self.decode_left = keep and stale_role and self.prefilling
        return [*drop, *self._restart(detail, cluster, keep_blocks=keep, stale_role=stale_role, complete=complete)]

    def failed(
        self, attempt: Attempt, detail: str, cluster: KnownWorkers, *, blocks_lost: bool, complete: bool
    ) -> Effects:
        """Restart the sequence after its worker could not continue.

        Blocks that do not arrive are the fault of their source, which might never send them.
        """
        drop = self._drop(attempt)
        source = (self.blocks or self.streamed_blocks) if blocks_lost else None
        self.avoid.add(source.worker_id if source is not None else attempt.worker[0])
        return [*drop, *self._restart(detail, cluster, keep_blocks=False, complete=complete)]

    def reservation_lost(self) -> None:
        """Forget the reserved worker, which is gone; the loss is handled when the credit is used."""
        self.reserved = None

    def lost(self, attempt: Attempt, cluster: KnownWorkers, *, silent: bool, complete: bool) -> Effects:
        """Handle the loss of a worker, whose stream broke or was closed because the worker was silent.

        Blocks that still wait at a prefill worker serve another decode worker, if more than one may read them. A
        pull from a dead worker ends by itself, with or without the blocks. A pull from a silent worker would hang.
        """
        if attempt not in (self.prompt_attempt, self.decode_attempt):
            return NOTHING
        pulled = attempt is self.prompt_attempt and self.decode_attempt is not None and not self.prefilling
        if pulled and silent:
            self.blocks = None
        give_up = self._give_up_blocks() if attempt is self.decode_attempt and self.blocks_given else NOTHING
        drop = [*give_up, *self._drop(attempt)]
        if self.waiting:  # it waited for a decode worker, and its blocks are lost
            self.blocks = None
            return drop
        if pulled and not silent:
            return drop
        why, keep = f"worker {attempt.worker[0]} was lost", self.blocks is not None
        return [*drop, *self._restart(why, cluster, keep_blocks=keep, complete=complete)]

    # ------------------------------------------------------------ rerouting and the end

    def gives_way(self, why: str) -> Effects:
        """Leave the decode worker, and wait with the tokens so far until there is a place again."""
        if not self.runs or self.ended or self.waiting:
            return NOTHING
        self.given_up += 1
        return [*self._release(keep_blocks=False), Requeue(why)]

    def drop_stale_kv(self) -> Effects:
        """Release KV blocks that no remaining worker can pull, while the request waits."""
        return self._release(keep_blocks=False)

    def end(self, why: EndReason, detail: str = "") -> Effects:
        """Return the end of the sequence, unless it has ended already."""
        return NOTHING if self.ended else [End(why, detail)]

    def over(self) -> Effects:
        """Mark the sequence as ended and release everything it holds on workers."""
        self.ended, self.waiting = True, False
        return self._release(keep_blocks=False)

    def _restart(
        self, why: str, cluster: KnownWorkers, *, keep_blocks: bool, complete: bool, stale_role: bool = False
    ) -> Effects:
        """Reroute the sequence after an attempt that ended early."""
        if self.prefilling:  # nothing is lost: the attempt that computes the prompt decides
            return NOTHING
        return self._reroute(why, cluster, keep_blocks=keep_blocks, stale_role=stale_role, complete=complete)

    def _reroute(
        self, why: str, cluster: KnownWorkers, *, keep_blocks: bool, stale_role: bool, complete: bool
    ) -> Effects:
        """Return the sequence to the head of the queue. With `stale_role`, the worker had another role.

        A request with complete output ends here, since only the event of its end was lost.
        """
        if self.ended or self.waiting:
            return NOTHING
        if complete:
            return self.end(EndReason.COMPLETE)
        if stale_role and self.stale_role_retries < MAX_STALE_ROLE_RETRIES:
            self.stale_role_retries += 1
        else:
            self.reroutes += 1
        if self.reroutes > cluster.max_reroutes:
            return self.end(EndReason.GAVE_UP, f"gave up after {cluster.max_reroutes} attempts elsewhere: {why}")
        blocks = self.blocks
        keep_blocks = keep_blocks and blocks is not None and cluster.decodes(self.model, blocks.kind)
        return [*self._release(keep_blocks=keep_blocks), Requeue(why)]

    def _drop(self, attempt: Attempt) -> Effects:
        """Forget an attempt that its worker has ended or lost."""
        self.handing_over = False
        if self.prompt_attempt is attempt:
            self.prompt_attempt = None
        if self.decode_attempt is attempt:
            self.decode_attempt = None
        return [Forget(attempt, abort=False)]

    def _release(self, *, keep_blocks: bool) -> list[Effect]:
        """Release everything the sequence holds on workers, except blocks kept for another decode worker."""
        effects: list[Effect] = []
        if self.blocks_given:
            effects += self._give_up_blocks()
        if self.decode_attempt is not None:
            effects.append(Forget(self.decode_attempt, abort=True))
            self.decode_attempt = None
        if not keep_blocks:
            effects += self._forget_prompt(abort=True)
            self.blocks = self.streamed_blocks = None
        if self.reserved is not None:
            effects.append(Release(self.reserved))
            self.reserved = None
        return effects

    def _give_up_blocks(self) -> Effects:
        """Leave blocks that only one reader may pull to the decode worker that is pulling them."""
        # If their source freed them, they could be reused for another prompt while the worker reads them, and stay in
        # its prefix cache. The source notices when the worker is done with them or gone.
        self.blocks = None
        return self._forget_prompt(abort=False)

    def _forget_prompt(self, *, abort: bool) -> Effects:
        attempt, self.prompt_attempt = self.prompt_attempt, None
        return NOTHING if attempt is None else [Forget(attempt, abort)]
