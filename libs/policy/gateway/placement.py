"""Where one sequence is: in the queue, on a worker for its prompt, on one for its tokens, on its way between. Pure.

What happened goes in, what is to be done comes out: `Dispatcher` and `Attempts` of libs/dispatch carry effects out in
their order. Nobody else changes where a sequence is. At most one attempt computes its prompt or holds the blocks of it,
and at most one decodes; a decode credit is set aside from binding until it decodes there.
"""

from dataclasses import dataclass, field
from typing import Final, Protocol

from libs.policy.gateway.effects import (
    NOTHING,
    Attempt,
    Blocks,
    Effect,
    Effects,
    End,
    EndReason,
    Forget,
    HandOver,
    Proceed,
    Release,
    Requeue,
    Reserve,
    Submit,
    WorkerKey,
)
from libs.policy.roles import Phase, Refusal

MAX_HAND_OVERS: Final = 32
"""Of one sequence; a worker that would hand it over once more keeps it to its end."""
MAX_STALE_ROLE_RETRIES: Final = 256
"""Retries of one sequence because a worker had another role by then: far more than role changes in its lifetime. Any
more count as failures, so that a worker that always refuses does not keep it going for ever."""
OTHER_ROLE: Final = (Refusal.STALE_ROLE, Refusal.DRAINING)
"""What a worker refuses that has another role than its gateway knew, or leaves."""


@dataclass(frozen=True, slots=True)
class Partner:
    """A worker, as far as sequences that are to decode there are concerned."""

    takes_decode: bool
    kv_kind: str
    streams_kv: bool


class KnownWorkers(Protocol):
    """What is known of the workers now."""

    max_reroutes: int
    """How often a sequence may go elsewhere."""

    def partner(self, worker: WorkerKey) -> Partner | None:
        """None: it cannot be reached."""
        ...

    def decodes(self, model: str, kv_kind: str) -> bool:
        """Whether some worker of the model could take over blocks of this kind, credits aside."""
        ...


@dataclass(eq=False, slots=True)
class Placement:
    """One sequence's. Its methods take what happened, with what its output is by then."""

    model: str
    sequence_id: int = 0
    """Of its next attempts: another one each time it waits or is handed over, so that no worker gets one twice."""
    prompt_attempt: Attempt | None = None
    """Computes its prompt, or holds the blocks that it left."""
    decode_attempt: Attempt | None = None
    reserved: WorkerKey | None = None
    """Has a decode credit set aside for it."""
    blocks: Blocks | None = None
    """That wait, at its prompt's worker, for whoever decodes."""
    streamed_blocks: Blocks | None = None
    """That can be read while its prompt is computed."""
    waiting: bool = False
    ended: bool = False
    reroutes: int = 0
    """How often it went elsewhere because a worker failed it."""
    stale_role_retries: int = 0
    """Retries because a worker had changed its role by then; they do not count as failures."""
    hand_overs: int = 0
    """How often it went on elsewhere with its KV because its worker took another role."""
    given_up: int = 0
    """How often it gave its place up to another tenant's."""
    handing_over: bool = False
    """Its worker has been asked to hand it over; one that cannot move its KV ends it."""
    recomputes: int = 0
    """How often its prompt was computed again although its first token had come."""
    avoid: set[str] = field(default_factory=set)
    """Ids of workers that have failed it."""
    prefill_worker: str = ""
    """Id of the one that computed its prompt last."""
    decode_worker: str = ""
    """Empty until its second phase was sent to one."""

    # ------------------------------------------------------------ what is known

    @property
    def prefilling(self) -> bool:
        """Whether a worker computes its prompt for another one, whether or not that pulls already."""
        return self.prompt_attempt is not None and self.prompt_attempt.phase is Phase.PREFILL and self.blocks is None

    @property
    def blocks_given(self) -> bool:
        """Whether blocks that can be read once are a decode worker's, which may read them any time until it says that
        the sequence has ended there."""
        return self.blocks is not None and self.blocks.once and self.decode_attempt is not None

    @property
    def resumed(self) -> bool:
        """Whether it was bound already and lost its worker, or its place there."""
        return self.reroutes > 0 or self.stale_role_retries > 0 or self.given_up > 0

    @property
    def runs(self) -> bool:
        """Whether one worker makes its tokens, and nothing of it is on its way to another."""
        attempt = self.decode_attempt or self.prompt_attempt
        apart = self.blocks is not None or self.reserved is not None or self.handing_over
        return attempt is not None and attempt.phase is not Phase.PREFILL and attempt.tokens > 0 and not apart

    # ------------------------------------------------------------ to workers

    def queued(self, sequence_id: int) -> None:
        """It waits for workers; its next attempts have this id."""
        self.sequence_id, self.waiting = sequence_id, True

    def bound(self, prompt: WorkerKey | None, decode: WorkerKey, output_tokens: int) -> Effects:
        """Workers have room for it; `prompt` None: its prompt is computed and its blocks wait."""
        self.waiting = False
        self.reserved = decode
        if prompt is None:
            return [Reserve(decode), self._submit_decode(decode, self.blocks, output_tokens)]
        self.recomputes += output_tokens > 0
        self.prefill_worker = prompt[0]
        phase = Phase.PREFILL
        if prompt == decode:
            phase, self.reserved, self.decode_worker = Phase.BOTH, None, decode[0]
        self.prompt_attempt = Attempt(prompt, self.sequence_id, phase, output_tokens)
        return [Reserve(decode), Submit(self.prompt_attempt, None)]

    def _submit_decode(self, worker: WorkerKey, blocks: Blocks | None, output_tokens: int) -> Submit:
        """Against the credit that is set aside."""
        self.reserved, self.decode_worker = None, worker[0]
        self.decode_attempt = Attempt(worker, self.sequence_id, Phase.DECODE, output_tokens)
        return Submit(self.decode_attempt, blocks)

    def opened_blocks(
        self, attempt: Attempt, blocks: Blocks, cluster: KnownWorkers, output_tokens: int, left: int
    ) -> Effects:
        """Blocks can be read while the prompt is computed; `left`: tokens that may still come. A decode worker that
        cannot read them so is asked afterwards."""
        worker = self.reserved
        partner = cluster.partner(worker) if worker is not None else None
        if worker is None or partner is None or not self.prefilling or attempt is not self.prompt_attempt:
            return NOTHING
        reads = partner.takes_decode and partner.streams_kv and partner.kv_kind == blocks.kind and not blocks.once
        if not reads or left <= 1:
            return NOTHING
        self.streamed_blocks = blocks
        return [self._submit_decode(worker, blocks, output_tokens)]

    def prefilled(self, blocks: Blocks, cluster: KnownWorkers, output_tokens: int, *, whole: bool) -> Effects:
        """Its prompt is computed and its blocks wait; `whole`: with its first token the output is complete."""
        if whole:
            return self.end(EndReason.WHOLE)
        self.blocks, self.streamed_blocks = blocks, None
        if self.decode_attempt is not None:
            return [Proceed(self.decode_attempt)]
        return self._go_on(cluster, output_tokens, whole=False)

    def _go_on(self, cluster: KnownWorkers, output_tokens: int, *, whole: bool) -> Effects:
        """Second phase, on the worker whose credit is set aside; back to the queue for another one if there is none."""
        worker, blocks = self.reserved, self.blocks
        partner = cluster.partner(worker) if worker is not None else None
        takes = partner is not None and partner.takes_decode
        if worker is None or partner is None or blocks is None or not takes or partner.kv_kind != blocks.kind:
            has_left = worker is not None and not takes
            why = "its decode worker takes no more work"
            return self._reroute(why, cluster, keep_blocks=True, stale_role=has_left, whole=whole)
        return [self._submit_decode(worker, blocks, output_tokens)]

    def first_decoded(self) -> Effects:
        """The first token has come from where it decodes: blocks have arrived there and their sender knows."""
        self.blocks = None
        return self._forget_prompt(abort=False)

    # ------------------------------------------------------------ hand-overs

    def hands_over(self, attempt: Attempt, sequence_id: int) -> bool:
        """The worker wants to hand this attempt over, and repeats it with each role change. Returns whether the gateway
        should look for a place, under the new id; False where one is reserved."""
        runs = attempt in (self.prompt_attempt, self.decode_attempt) and self.blocks is None
        if not runs or self.reserved is not None or self.hand_overs >= MAX_HAND_OVERS:
            return False
        self.sequence_id = sequence_id
        return True

    def place_found(self, attempt: Attempt, worker: WorkerKey) -> Effects:
        """A worker has room to take it over from the one of `attempt`."""
        self.reserved, self.handing_over = worker, True
        return [Reserve(worker), HandOver(attempt)]

    def handed_over(
        self, attempt: Attempt, blocks: Blocks, cluster: KnownWorkers, output_tokens: int, *, whole: bool
    ) -> Effects:
        """The worker has handed it over: the attempt stands for the blocks that it left, as that of a prompt does."""
        forget = self._forget_prompt(abort=True) if attempt is not self.prompt_attempt else NOTHING
        self.prompt_attempt, self.decode_attempt = attempt, None
        self.blocks, self.streamed_blocks, self.handing_over = blocks, None, False
        self.hand_overs += 1
        return [*forget, *self._go_on(cluster, output_tokens, whole=whole)]

    # ------------------------------------------------------------ what workers end

    def finished(self, attempt: Attempt, cluster: KnownWorkers, *, well: bool, whole: bool) -> Effects:
        """The worker has ended it, `well`, or without its KV when it was to hand it over, or for no reason."""
        handing_over, drop = self.handing_over, self._drop(attempt)
        if well:
            return [*drop, *self.end(EndReason.WHOLE)]
        why = "its worker took another role" if handing_over else "its worker ended it"
        return [*drop, *self._restart(why, cluster, keep_blocks=False, stale_role=handing_over, whole=whole)]

    def refused(
        self, attempt: Attempt, why: Refusal | None, detail: str, cluster: KnownWorkers, *, whole: bool
    ) -> Effects:
        """The worker has not taken it; `why` None: for a reason that is not known here."""
        drop = self._drop(attempt)
        if why is Refusal.INVALID:
            return [*drop, *self.end(EndReason.REFUSED, f"worker {attempt.worker[0]} refused: {detail}")]
        self.avoid.add(attempt.worker[0])
        keep, stale_role = attempt.phase is Phase.DECODE, why in OTHER_ROLE
        return [*drop, *self._restart(detail, cluster, keep_blocks=keep, stale_role=stale_role, whole=whole)]

    def failed(
        self, attempt: Attempt, detail: str, cluster: KnownWorkers, *, blocks_lost: bool, whole: bool
    ) -> Effects:
        """The worker cannot go on with it. Blocks that do not come are their source's fault: computed there again, they
        might never come."""
        drop = self._drop(attempt)
        source = (self.blocks or self.streamed_blocks) if blocks_lost else None
        self.avoid.add(source.worker_id if source is not None else attempt.worker[0])
        return [*drop, *self._restart(detail, cluster, keep_blocks=False, whole=whole)]

    def reservation_lost(self) -> None:
        """The worker is gone that had a credit set aside; seen to when the credit would be used."""
        self.reserved = None

    def lost(self, attempt: Attempt, cluster: KnownWorkers, *, silent: bool, whole: bool) -> Effects:
        """The stream to a worker broke, or was left because it was silent.

        Blocks that still wait at a prefill worker serve another decode worker, if more than one can read them. A pull
        from a worker that died ends by itself, with or without the blocks. From a silent one it would hang.
        """
        if attempt not in (self.prompt_attempt, self.decode_attempt):
            return NOTHING
        pulled = attempt is self.prompt_attempt and self.decode_attempt is not None and not self.prefilling
        if pulled and silent:
            self.blocks = None
        give_up = self._give_up_blocks() if attempt is self.decode_attempt and self.blocks_given else NOTHING
        drop = [*give_up, *self._drop(attempt)]
        if self.waiting:  # for a decode worker: its blocks are gone
            self.blocks = None
            return drop
        if pulled and not silent:
            return drop
        why, keep = f"worker {attempt.worker[0]} was lost", self.blocks is not None
        return [*drop, *self._restart(why, cluster, keep_blocks=keep, whole=whole)]

    # ------------------------------------------------------------ elsewhere, and the end

    def gives_way(self, why: str) -> Effects:
        """Leave its worker, where it runs, and wait with its tokens so far until there is a place for it again."""
        if not self.runs or self.ended or self.waiting:
            return NOTHING
        self.given_up += 1
        return [*self._release(keep_blocks=False), Requeue(why)]

    def drop_stale_kv(self) -> Effects:
        """Release KV blocks that no worker is left to pull, while the request waits."""
        return self._release(keep_blocks=False)

    def end(self, why: EndReason, detail: str = "") -> Effects:
        """It is over, for one of these reasons."""
        return NOTHING if self.ended else [End(why, detail)]

    def over(self) -> Effects:
        """It is over, for whatever reason: all that it has on workers is let go."""
        self.ended, self.waiting = True, False
        return self._release(keep_blocks=False)

    def _restart(
        self, why: str, cluster: KnownWorkers, *, keep_blocks: bool, whole: bool, stale_role: bool = False
    ) -> Effects:
        """An attempt has ended before its time. While the other one computes the prompt nothing is lost: it decides."""
        if self.prefilling:
            return NOTHING
        return self._reroute(why, cluster, keep_blocks=keep_blocks, stale_role=stale_role, whole=whole)

    def _reroute(self, why: str, cluster: KnownWorkers, *, keep_blocks: bool, stale_role: bool, whole: bool) -> Effects:
        """Return to the head of the queue with prompt and tokens so far; `stale_role`: the worker had another role. A
        request whose output is whole ends here: it lost only the event of its end."""
        if self.ended or self.waiting:
            return NOTHING
        if whole:
            return self.end(EndReason.WHOLE)
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
        """Its worker has ended an attempt, or is lost."""
        self.handing_over = False
        if self.prompt_attempt is attempt:
            self.prompt_attempt = None
        if self.decode_attempt is attempt:
            self.decode_attempt = None
        return [Forget(attempt, abort=False)]

    def _release(self, *, keep_blocks: bool) -> list[Effect]:
        """Let go of everything on workers, except blocks that are to wait for another decode worker."""
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
        """Leave blocks that can be read once to the decode worker that has them: whoever else reads them may find
        another prompt's. Freed at their source they could become that while it reads, and stay in its prefix cache;
        that it is done with them, or gone, the source learns by itself."""
        self.blocks = None
        return self._forget_prompt(abort=False)

    def _forget_prompt(self, *, abort: bool) -> Effects:
        attempt, self.prompt_attempt = self.prompt_attempt, None
        return NOTHING if attempt is None else [Forget(attempt, abort)]
