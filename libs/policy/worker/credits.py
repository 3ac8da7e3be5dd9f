"""Credits, against which gateways bind requests, so that work waits in gateways and not in workers.

A slot of a worker is free, granted to a gateway, or in use by a sequence. Free slots are granted at once, so an idle
system needs no round trip. When gateways compete, the one with the most urgent first request wins, and credits that
others hold unused are recalled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from libs.policy.roles import Assigned, Role
from libs.policy.speed import HAND_OVER_S

# A waiting gateway comes first after this many grants to more urgent ones, whatever its deadline.
MAX_PASSED_OVER = 16
NO_DEADLINE = 2**64


@dataclass(frozen=True, slots=True)
class GatewayDemand:
    """The requests that wait in one gateway; ties on `gateway_id` are resolved equally on every worker."""

    gateway_id: str
    requests: int = 0
    head_deadline_ns: int = 0

    @property
    def urgency(self) -> tuple[int, str]:
        """Sort key; the smaller one is more urgent.

        All workers share this strict order. Otherwise two gateways could each hold the credit that the other lacks,
        forever.
        """
        return self.head_deadline_ns or NO_DEADLINE, self.gateway_id


@dataclass(slots=True)
class _Account:
    """The credits of one gateway for one kind of slot."""

    held: int = 0
    """Credits granted and sent but neither used nor returned."""
    granting: int = 0
    recalling: int = 0
    """Credits to recall whose recall has not been sent."""
    recalled: int = 0
    """Credits whose recall was sent but not answered."""
    passed_over: int = 0

    @property
    def total(self) -> int:
        return self.held + self.granting

    @property
    def keeps(self) -> int:
        return self.total - self.recalling - self.recalled

    def forget_recalls(self) -> None:
        self.recalled = min(self.recalled, self.held)
        self.recalling = min(self.recalling, self.held - self.recalled)


@dataclass(slots=True)
class CreditPool:
    """Slots of one kind; `settle` distributes them, and `take` returns the changes for one gateway.

    Call `settle` after any other change.
    """

    slots: int
    in_use: int = 0
    _accounts: dict[int, _Account] = field(default_factory=dict)

    @property
    def granted(self) -> int:
        return sum(account.total for account in self._accounts.values())

    def attach(self, gateway: int) -> None:
        self._accounts[gateway] = _Account()

    def detach(self, gateway: int) -> None:
        """Drop a gateway and its credits; its sequences stay in use until they end."""
        self._accounts.pop(gateway, None)

    def use(self, gateway: int) -> bool:
        """Turn a held credit into a slot in use; return False if the gateway holds none."""
        account = self._accounts[gateway]
        if not account.held:
            return False
        account.held -= 1
        self.in_use += 1
        # The use settles a recall that crossed with it: the gateway returns the credits that it still has.
        account.forget_recalls()
        return True

    def free(self) -> None:
        """Release the slot of a sequence that ended or was refused."""
        self.in_use -= 1

    def returned(self, gateway: int, count: int) -> None:
        """Take back `count` unused credits from a gateway."""
        account = self._accounts[gateway]
        count = min(count, account.held)
        account.held -= count
        account.recalled = max(account.recalled - count, 0)
        account.forget_recalls()

    def spent(self, gateway: int, count: int) -> None:
        """Settle recalls that crossed with the use of `count` of the recalled credits."""
        account = self._accounts[gateway]
        account.recalled = max(account.recalled - count, 0)
        account.forget_recalls()

    def take(self, gateway: int) -> tuple[int, int]:
        """Return (grant, recall) to send to the gateway, and mark them as sent."""
        account = self._accounts[gateway]
        grant, recall = account.granting, account.recalling
        account.held += grant
        account.recalled += recall
        account.granting = account.recalling = 0
        return grant, recall

    def has_news(self, gateway: int) -> bool:
        """Return whether `take` would return a grant or a recall."""
        account = self._accounts[gateway]
        return bool(account.granting or account.recalling)

    def settle(self, waiting: Mapping[int, GatewayDemand]) -> None:
        """Grant free slots and recall credits needed elsewhere; `waiting` covers every attached gateway."""
        free = self._free()
        if free < 0:
            self._recall(-free - self._pending(), sorted(self._accounts, key=lambda g: waiting[g].requests > 0))
            return
        if len(self._accounts) == 1:  # no other gateway competes
            next(iter(self._accounts.values())).granting += free
            return
        unmet = sum(max(waiting[g].requests - account.keeps, 0) for g, account in self._accounts.items())
        self._recall(unmet - free - self._pending(), [g for g in self._accounts if not waiting[g].requests])
        if self._accounts:
            for _ in range(self._free()):
                self._grant(waiting)
        if unmet:
            self._relieve(waiting)
        else:
            self._level(waiting)

    def _free(self) -> int:
        return self.slots - self.in_use - self.granted

    def _pending(self) -> int:
        return sum(account.recalling + account.recalled for account in self._accounts.values())

    def _grant(self, waiting: Mapping[int, GatewayDemand]) -> None:
        accounts = self._accounts
        needy = [g for g, account in accounts.items() if waiting[g].requests > account.keeps]
        if needy:
            chosen = min(needy, key=lambda g: (accounts[g].passed_over < MAX_PASSED_OVER, waiting[g].urgency))
            for gateway in needy:
                accounts[gateway].passed_over += 1
            accounts[chosen].passed_over = 0
        else:
            chosen = min(accounts, key=lambda g: (accounts[g].keeps, waiting[g].gateway_id))
        accounts[chosen].granting += 1

    def _recall(self, count: int, donors: list[int]) -> None:
        for gateway in donors:
            if count <= 0:
                return
            account = self._accounts[gateway]
            unsent = min(count, account.granting)
            account.granting -= unsent  # never sent, so free again without a round trip
            requested = min(count - unsent, account.held - account.recalling - account.recalled)
            account.recalling += requested
            count -= unsent + requested

    def _relieve(self, waiting: Mapping[int, GatewayDemand]) -> None:
        """Recall one credit from a less urgent gateway if a more urgent one has none."""
        accounts = self._accounts
        starving = [g for g in accounts if waiting[g].requests and not accounts[g].total]
        donors = [g for g, account in accounts.items() if account.held > account.recalling + account.recalled]
        if not starving or not donors or self._pending():
            return
        donor = max(donors, key=lambda g: waiting[g].urgency)
        if min(waiting[g].urgency for g in starving) < waiting[donor].urgency:
            accounts[donor].recalling += 1

    def _level(self, waiting: Mapping[int, GatewayDemand]) -> None:
        """Spread unused credits evenly, so that late gateways get their share."""
        accounts = self._accounts
        idle = [g for g in accounts if not waiting[g].requests]
        if not idle or self._pending():
            return
        richest = max(idle, key=lambda g: accounts[g].keeps)
        surplus = accounts[richest].keeps - min(account.keeps for account in accounts.values())
        self._recall(surplus // 2, [richest])
        for _ in range(self._free()):
            self._grant(waiting)


class Credits:
    """A worker's slots of both kinds, for prompts to prefill and for sequences that decode."""

    def __init__(self) -> None:
        self.prefill = CreditPool(0)
        self.decode = CreditPool(0)
        self._pools = (self.prefill, self.decode)

    def resize(self, prefill_slots: int, decode_slots: int) -> None:
        """Set the number of slots, as after a change of role."""
        self.prefill.slots, self.decode.slots = prefill_slots, decode_slots

    def attach(self, gateway: int) -> None:
        for pool in self._pools:
            pool.attach(gateway)

    def detach(self, gateway: int) -> None:
        for pool in self._pools:
            pool.detach(gateway)

    def settle(self, waiting: Mapping[int, GatewayDemand]) -> Iterable[int]:
        """Distribute slots of both kinds and return the gateways that have changes to receive."""
        for pool in self._pools:
            pool.settle(waiting)
        return [gateway for gateway in waiting if self.has_news(gateway)]

    def has_news(self, gateway: int) -> bool:
        return self.prefill.has_news(gateway) or self.decode.has_news(gateway)

    def take(self, gateway: int) -> tuple[int, int, int, int]:
        """Return (prefill grant, prefill recall, decode grant, decode recall) to send to the gateway."""
        return *self.prefill.take(gateway), *self.decode.take(gateway)


MIN_PROMPTS: Final = 4
# Other prompts wait in the gateways, where they can still be sent to another worker.
MAX_PROMPTS: Final = 64
# Short prompts get slots to fill the running step, the next one, and the time of a hand-over (`HAND_OVER_S`).
FILLED_STEPS: Final = 2

LONG_PROMPT_TOKENS: Final = 1024.0
"""The prompt length assumed before the first prompt."""
PROMPTS_AVERAGED: Final = 16


class PromptLength:
    """A running mean of the lengths of recent prompts."""

    def __init__(self) -> None:
        self.mean_tokens = LONG_PROMPT_TOKENS

    def came(self, tokens: int) -> None:
        self.mean_tokens += (tokens - self.mean_tokens) / PROMPTS_AVERAGED


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """The figures that determine a role's number of slots."""

    max_sequences: int
    """The maximum number of sequences in the engine's running batch."""
    prompt_tokens: float
    """The mean length of recent prompts, in tokens."""
    chunk_tokens: int
    """The maximum number of prompt tokens that one step computes."""
    step_s: float
    """The known or assumed time of a step of `chunk_tokens`; greater than 0."""
    decoding: int = 0
    """Sequences that occupy the batch against decode credits, whichever role granted them."""


def slots(role: int, facts: SlotFacts) -> tuple[int, int]:
    """Return how many (prefill, decode) requests a worker of `role` accepts at once.

    A sequence computed from start to end takes a decode slot, where it spends nearly all its time.
    """
    if role == Role.PREFILL:
        return prefill_slots(facts), 0
    return (0, facts.max_sequences) if role == Role.MIXED else (0, 0)


def prefill_slots(facts: SlotFacts) -> int:
    """Return the number of prompt slots, larger for short prompts.

    It is a power of two within the bounds, so a new mean seldom changes it. It never exceeds the engine's free places:
    sequences that still decode from another role keep theirs, and a prompt should wait in its gateway. It may be 0,
    since decodes need no prompt to end.
    """
    wanted_tokens = facts.chunk_tokens * (FILLED_STEPS + HAND_OVER_S / facts.step_s)
    prompts = MIN_PROMPTS
    while prompts < MAX_PROMPTS and prompts * facts.prompt_tokens < wanted_tokens:
        prompts *= 2
    return min(prompts, max(facts.max_sequences - facts.decoding, 0))


# Nothing decodes in role prefill, so the engine's own chunk size is the only limit.
WHOLE_CHUNK_TOKENS: Final = 1 << 30


class TakenSequence(Protocol):
    """A sequence that was accepted under some prompt budget."""

    @property
    def budget_tokens(self) -> int:
        """The budget of the role in which the worker accepted the sequence."""
        ...

    @property
    def awaits_prompt(self) -> bool:
        """Return whether this worker still has to compute the prompt."""
        ...

    @property
    def yields(self) -> bool:
        """Return whether the prompt waits while another one can be computed."""
        ...


def role_budget(assignment: Assigned) -> int:
    if assignment.role == Role.PREFILL:
        return WHOLE_CHUNK_TOKENS
    return assignment.budget_tokens if assignment.role == Role.MIXED else 0


def engine_budget(own_tokens: int, taken: Iterable[TakenSequence]) -> int:
    """Return the prompt budget of the engine: the role's own, or a larger one that accepted prompts still need.

    A larger budget lasts until the prompts accepted under it are computed. Yielding prompts keep it only if the
    role's own budget would never compute them.
    """
    awaited = (each.budget_tokens for each in taken if each.awaits_prompt and not (own_tokens and each.yields))
    return max(own_tokens, max(awaited, default=0))
