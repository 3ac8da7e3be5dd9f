"""The search for prompts that killed their workers, as opposed to prompts that merely ran beside them.

A prompt that kills its worker kills the next one at the same point, while other prompts have moved elsewhere by then. A
prompt is accused if it was being computed on two workers when each was lost, at the same stage both times and without
progress in between, and if it is the only such prompt. It is poison once both workers are known to be dead, because a
worker whose connection broke or fell silent may come back.

Requests with the same prompt that arrive at once would reach every worker before the first is lost. So only as many run
at a time as a prompt may kill, and the others wait until one has a token. Tenants are counted separately: the wait of a
request must not reveal another tenant's prompts.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, TypeVar

from libs.policy.newest import put_newest

MAX_LOST_WORKERS: Final = 2
"""The maximum number of workers that one request may kill."""
FRESH_TOKENS: Final = 4
"""The output tokens on a new worker after which a choice is past the point where the last worker was lost.

The number covers tokens in transit. A choice with fewer tokens may have killed its worker.
"""
MAX_SUSPECTS: Final = 4096
"""The maximum number of prompts remembered for the loss of one worker; beyond it the oldest losses are forgotten."""
MAX_POISON: Final = 1024
"""The maximum number of prompts that are refused; beyond it the oldest are forgotten."""
MAX_WELL: Final = 4096
"""The maximum number of prompts remembered as recently computed; beyond it the oldest are forgotten."""
WELL_NS: Final = 60_000_000_000
"""The time for which a computed prompt is trusted for one loss.

A frequent prompt runs on every worker, and thus on every lost one.
"""
MAX_LOSSES: Final = 256
"""The maximum number of lost workers that are remembered."""
SUSPECTED_NS: Final = 600_000_000_000
"""The time for which a lost worker counts against the prompts it held."""
HOLD_NS: Final = 10_000_000_000
"""The time that an accused prompt waits for its workers to return; those that do not are assumed dead."""

Worker = tuple[str, int]
"""A worker's id and incarnation: a restarted worker is a different one."""
Prompt = bytes
"""The fingerprint of a model and a prompt's tokens."""


class WorkStage(Enum):
    """The stage of a worker's computation for a choice."""

    PROMPT = "prompt"
    # The prompt is computed again, with the tokens generated elsewhere.
    AGAIN = "again"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class HeldChoice:
    """A choice that a worker was computing when it was lost."""

    prompt: Prompt
    request: frozenset[Prompt]
    """The prompts of all its request's choices, which are judged together."""
    stage: WorkStage
    tokens: int
    """The output tokens generated on that worker."""

    @property
    def exposed(self) -> bool:
        """Return whether the choice may have killed the worker, because it had just begun this stage."""
        return self.stage is not WorkStage.TOKENS or self.tokens < FRESH_TOKENS


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """The loss of a worker that held a given prompt."""

    number: int
    """The position of this loss among all losses."""
    stage: WorkStage
    exposed: bool


@dataclass(frozen=True, slots=True)
class _Accusation:
    """An accusation of one request, pending until its workers return or die."""

    prompts: frozenset[Prompt]
    """The prompts of the accused request's choices that were exposed."""
    losses: dict[Worker, WorkerLoss]
    since_ns: int


@dataclass(slots=True)
class _LostWorker:
    number: int
    dead: bool = False
    explained: bool = False
    """True if a prompt has been convicted of killing the worker."""


@dataclass(slots=True)
class _Record:
    seen_ns: int
    losses: dict[Worker, WorkerLoss] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SuspectTrial:
    """The progress that clears a suspected choice."""

    stage: WorkStage
    until: int
    """The number of output tokens that clears the choice."""


class Suspicion:
    """The suspected and convicted prompts, derived from the loss, death and return of workers."""

    def __init__(self, memory_ns: int) -> None:
        """Create an empty record that refuses convicted prompts for `memory_ns` nanoseconds."""
        self._memory_ns = memory_ns
        self._suspects: OrderedDict[Prompt, _Record] = OrderedDict()
        # There are never more of these than suspects.
        self._accused: list[_Accusation] = []
        self._poison: OrderedDict[Prompt, _Record] = OrderedDict()
        # By prompt, the time at which its last answer was completed.
        self._well: OrderedDict[Prompt, int] = OrderedDict()
        self._lost: OrderedDict[Worker, _LostWorker] = OrderedDict()
        self._numbers = 0

    def __bool__(self) -> bool:
        """Return whether any prompt is suspected or refused."""
        return bool(self._suspects or self._poison)

    def poison(self, now_ns: int) -> int:
        """Return the number of prompts that are refused now."""
        _expire(self._poison, now_ns - self._memory_ns)
        return len(self._poison)

    def is_poison(self, prompt: Prompt, now_ns: int) -> bool:
        return bool(self.poison(now_ns)) and prompt in self._poison

    def stage(self, prompt: Prompt, now_ns: int) -> WorkStage | None:
        """Return the stage that a suspected prompt has to pass, or None if the prompt is not suspected."""
        _expire(self._suspects, now_ns - SUSPECTED_NS)
        losses = self._losses((prompt,))
        if not losses:
            return None
        return WorkStage.TOKENS if any(loss.stage is WorkStage.TOKENS for loss in losses.values()) else WorkStage.PROMPT

    def ended_well(self, prompt: Prompt, now_ns: int) -> None:
        """Record that the prompt and its whole answer were computed."""
        put_newest(self._well, prompt, now_ns, MAX_WELL)

    def is_alone(self, prompt: Prompt) -> bool:
        """Return whether the prompt may not share a worker with other suspects, because it was exposed to a loss."""
        return any(loss.exposed for loss in self._losses((prompt,)).values())

    def is_accused(self, prompt: Prompt) -> bool:
        """Return whether the prompt waits until its lost workers return or die."""
        return any(prompt in accusation.prompts for accusation in self._accused)

    def passed(self, prompt: Prompt, stage: WorkStage) -> None:
        """Clear a prompt that passed the stage: the workers lost at it did not die of the prompt."""
        record = self._suspects.get(prompt)
        if record is None:
            return
        for worker, loss in list(record.losses.items()):
            if stage is WorkStage.TOKENS or loss.stage is not WorkStage.TOKENS:
                del record.losses[worker]
                self._accused = [
                    each for each in self._accused if prompt not in each.prompts or worker not in each.losses
                ]
        if not record.losses:
            del self._suspects[prompt]

    def returned(self, worker: Worker) -> bool:
        """Drop everything held against prompts because of a worker that has returned.

        Return whether a prompt was waiting for this worker.
        """
        if self._lost.pop(worker, None) is None:
            return False
        accused = len(self._accused)
        self._accused = [each for each in self._accused if worker not in each.losses]
        for prompts, least in ((self._suspects, 1), (self._poison, MAX_LOST_WORKERS)):
            for prompt, record in list(prompts.items()):
                record.losses.pop(worker, None)
                if len(record.losses) < least:
                    del prompts[prompt]
        return len(self._accused) < accused

    def lost(self, worker: Worker, held: Sequence[HeldChoice], now_ns: int) -> None:
        """Record the loss of a worker with the choices it held, whether or not it is dead."""
        self._numbers += 1
        _expire(self._suspects, now_ns - SUSPECTED_NS)
        well = {each.prompt for each in held if now_ns - self._well.pop(each.prompt, -WELL_NS) < WELL_NS}
        held = [each for each in held if each.stage is not WorkStage.PROMPT or each.prompt not in well]
        blamed = self._blamed(worker, held)
        self._lost[worker] = _LostWorker(self._numbers)
        while len(self._lost) > MAX_LOSSES:
            self._lost.popitem(last=False)
        for each in held:
            self._suspect(worker, each, now_ns)
        if blamed:
            prompts = frozenset(each.prompt for each in blamed)
            accused = frozenset().union(*(each.prompts for each in self._accused))
            if not prompts <= accused:
                losses = self._losses(blamed[0].request, stage=blamed[0].stage)
                # A prompt held at two stages at once is recorded with only one of them.
                losses[worker] = WorkerLoss(self._numbers, blamed[0].stage, exposed=True)
                self._accused.append(_Accusation(prompts, losses, now_ns))

    def died(self, worker: Worker, now_ns: int) -> set[Prompt]:
        """Record the death of a lost worker, and return the prompts that are now poison."""
        lost = self._lost.get(worker)
        if lost is None or lost.dead:
            return set()
        lost.dead = True
        return self._judge(now_ns)

    def overdue(self, now_ns: int) -> set[Prompt]:
        """Return the prompts that are poison now because their workers have not come back in time."""
        return self._judge(now_ns) if self._accused else set()

    def _judge(self, now_ns: int) -> set[Prompt]:
        found: set[Prompt] = set()
        for accusation in list(self._accused):
            lost = (self._lost.get(worker) for worker in accusation.losses)
            if now_ns - accusation.since_ns >= HOLD_NS or all(each is None or each.dead for each in lost):
                self._convict(accusation, now_ns)
                found |= accusation.prompts
        return found

    def _blamed(self, worker: Worker, held: Sequence[HeldChoice]) -> list[HeldChoice]:
        """Return the choices of the one request that killed the worker; empty if that cannot be decided."""
        exposed: dict[tuple[frozenset[Prompt], WorkStage], list[HeldChoice]] = {}
        for each in held:
            if each.exposed:
                exposed.setdefault((each.request, each.stage), []).append(each)
        before = {key: self._losses(key[0], but=worker, stage=key[1]) for key in exposed}
        again = {key: losses for key, losses in before.items() if len(losses) >= MAX_LOST_WORKERS - 1}
        # Suspected prompts were kept on separate workers, so at most one of them is here.
        prompts = [key for key in again if key[1] is not WorkStage.TOKENS]
        if prompts:
            return exposed[prompts[0]] if len(prompts) == 1 else []
        # Many decoding choices may have come from the same lost worker. Blame the choice with the most losses, if there
        # is only one.
        most = max(map(len, again.values()), default=0)
        worst = [key for key, losses in again.items() if len(losses) == most]
        if len(worst) != 1 or (most < MAX_LOST_WORKERS and self._others_died(again[worst[0]])):
            return []
        return exposed[worst[0]]

    def _others_died(self, losses: dict[Worker, WorkerLoss]) -> bool:
        """Return whether other workers died unexplained since the first of these losses.

        If so, workers are dying for other reasons.
        """
        first = min(loss.number for loss in losses.values())
        others = (each for worker, each in self._lost.items() if worker not in losses)
        return any(each.number >= first and each.dead and not each.explained for each in others)

    def _convict(self, accusation: _Accusation, now_ns: int) -> None:
        losses = accusation.losses
        self._accused.remove(accusation)
        for prompt in accusation.prompts:
            self._suspects.pop(prompt, None)
            put_newest(self._poison, prompt, _Record(now_ns, dict(losses)), MAX_POISON)
        # Other prompts on those workers are no longer suspected for their loss.
        for worker in losses.keys() & self._lost.keys():
            self._lost[worker].explained = True
        for prompt, record in list(self._suspects.items()):
            for lost in losses.keys() & record.losses.keys():
                del record.losses[lost]
            if not record.losses:
                del self._suspects[prompt]

    def _suspect(self, worker: Worker, held: HeldChoice, now_ns: int) -> None:
        record = self._suspects.get(held.prompt) or _Record(now_ns)
        record.seen_ns = now_ns
        before = record.losses.get(worker)
        if before is None or held.exposed:
            record.losses[worker] = WorkerLoss(self._numbers, held.stage, held.exposed)
        put_newest(self._suspects, held.prompt, record, MAX_SUSPECTS)

    def _losses(
        self, prompts: Iterable[Prompt], but: Worker | None = None, stage: WorkStage | None = None
    ) -> dict[Worker, WorkerLoss]:
        """Return the workers lost by any of these prompts, at one stage, or at any if `stage` is None."""
        records = (self._suspects[prompt] for prompt in prompts if prompt in self._suspects)
        losses = ((worker, loss) for record in records for worker, loss in record.losses.items() if worker != but)
        return {worker: loss for worker, loss in losses if stage in (None, loss.stage)}


def _expire(records: OrderedDict[Prompt, _Record], before_ns: int) -> None:
    """Remove records last changed at or before `before_ns`; they are ordered by that time."""
    while records and next(iter(records.values())).seen_ns <= before_ns:
        records.popitem(last=False)


MAX_COMPUTED: Final = 4096
"""The maximum number of prompts remembered for a recent token; beyond it the oldest are forgotten."""
COMPUTED_NS: Final = 60_000_000_000
"""The time after its last first token in which a prompt may go to any number of workers."""

Key = tuple[str, Prompt]
"""A tenant and the fingerprint of its prompt."""
T = TypeVar("T", bound=Hashable)


class _Tries(Generic[T]):
    def __init__(self) -> None:
        self.waiting: dict[T, None] = {}
        self.on_workers: set[T] = set()


class FirstTries(Generic[T]):
    """The choices whose prompt has had no recent token, from their arrival until it has one."""

    def __init__(self) -> None:
        self._keys: dict[T, Key] = {}
        self._tries: dict[Key, _Tries[T]] = {}
        # By prompt, the time of its last first token.
        self._computed: OrderedDict[Key, int] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._tries)

    def came(self, choice: T, key: Key, now_ns: int) -> None:
        """Record the arrival of a choice, which now waits for workers."""
        if now_ns - self._computed.get(key, -COMPUTED_NS) >= COMPUTED_NS:
            self._keys[choice] = key
            self._tries.setdefault(key, _Tries()).waiting[choice] = None

    def bound(self, choice: T) -> None:
        """Record that a waiting choice was bound to workers."""
        if (tries := self._of(choice)) is not None:
            tries.waiting.pop(choice, None)
            tries.on_workers.add(choice)

    def waits(self, choice: T) -> None:
        """Record that a choice left its workers without a token and waits again."""
        if (tries := self._of(choice)) is not None:
            tries.on_workers.discard(choice)
            tries.waiting[choice] = None

    def computed(self, key: Key, now_ns: int) -> None:
        """Record a choice's first token, after which others with this prompt may go to any worker."""
        put_newest(self._computed, key, now_ns, MAX_COMPUTED)
        tries = self._tries.pop(key, None)
        if tries is not None:
            for each in (*tries.waiting, *tries.on_workers):
                del self._keys[each]

    def ended(self, choice: T) -> None:
        """Forget a choice that has ended, with or without a token."""
        key = self._keys.pop(choice, None)
        if key is None:
            return
        tries = self._tries[key]
        tries.waiting.pop(choice, None)
        tries.on_workers.discard(choice)
        if not tries.waiting and not tries.on_workers:
            del self._tries[key]

    def waiting_with(self, choice: T) -> list[T]:
        """Return the waiting choices of the same tenant and prompt, this one included if it waits."""
        tries = self._of(choice)
        return [] if tries is None else list(tries.waiting)

    def round(self) -> Callable[[T], bool]:
        """Return a predicate for one binding round: whether a waiting choice may go to workers.

        It counts the choices it has allowed in this round.
        """
        gone: Counter[Key] = Counter()

        def may_start(choice: T) -> bool:
            key = self._keys.get(choice)
            if key is None:
                return True
            if len(self._tries[key].on_workers) + gone[key] >= MAX_LOST_WORKERS:
                return False
            gone[key] += 1
            return True

        return may_start

    def _of(self, choice: T) -> _Tries[T] | None:
        key = self._keys.get(choice)
        return None if key is None else self._tries[key]
