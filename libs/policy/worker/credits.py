"""Credits: a request is bound to a worker only against one, so work waits in gateways, not in workers. Pure.

A slot of a worker is free, granted to a gateway, or in use by a sequence. Free slots are handed out at once, so that an
idle system needs no round trip; when gateways compete, the one whose head is most urgent comes first, and what another
holds unused is asked back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MAX_PASSED_OVER = 16
"""After this many grants to more urgent gateways a waiting one comes first, whatever its deadline."""
NO_DEADLINE = 2**64


@dataclass(frozen=True, slots=True)
class GatewayDemand:
    """What waits in one gateway; `gateway_id` settles ties alike on every worker."""

    gateway_id: str
    requests: int = 0
    head_deadline_ns: int = 0

    @property
    def urgency(self) -> tuple[int, str]:
        """Smaller is more urgent. A strict order shared by all workers, so that two gateways never hold what the other
        lacks for good."""
        return self.head_deadline_ns or NO_DEADLINE, self.gateway_id


@dataclass(slots=True)
class _Account:
    """What one gateway has of one kind of slot."""

    held: int = 0
    """Granted and sent, neither used nor returned."""
    granting: int = 0
    """Granted, not sent yet."""
    recalling: int = 0
    """To be recalled, not sent yet."""
    recalled: int = 0
    """Recalled, not answered yet."""
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
    """Slots of one kind. After any call `settle` decides who gets what, and `take` returns a gateway's news."""

    slots: int
    in_use: int = 0
    _accounts: dict[int, _Account] = field(default_factory=dict)

    @property
    def granted(self) -> int:
        """Slots that gateways hold unused."""
        return sum(account.total for account in self._accounts.values())

    def attach(self, gateway: int) -> None:
        """A gateway has come."""
        self._accounts[gateway] = _Account()

    def detach(self, gateway: int) -> None:
        """It has gone, with what it held; its sequences stay in use until they end."""
        self._accounts.pop(gateway, None)

    def use(self, gateway: int) -> bool:
        """Turn a held credit into a slot in use; False when the gateway holds none."""
        account = self._accounts[gateway]
        if not account.held:
            return False
        account.held -= 1
        self.in_use += 1
        # A recall that crossed with the use is settled by it: the gateway answers with what it still has.
        account.forget_recalls()
        return True

    def free(self) -> None:
        """A sequence has ended, or was refused."""
        self.in_use -= 1

    def returned(self, gateway: int, count: int) -> None:
        """The gateway has given back `count` unused credits."""
        account = self._accounts[gateway]
        count = min(count, account.held)
        account.held -= count
        account.recalled = max(account.recalled - count, 0)
        account.forget_recalls()

    def spent(self, gateway: int, count: int) -> None:
        """The gateway had spent `count` of what was asked back before it heard of it."""
        account = self._accounts[gateway]
        account.recalled = max(account.recalled - count, 0)
        account.forget_recalls()

    def take(self, gateway: int) -> tuple[int, int]:
        """(grant, recall) to tell the gateway now."""
        account = self._accounts[gateway]
        grant, recall = account.granting, account.recalling
        account.held += grant
        account.recalled += recall
        account.granting = account.recalling = 0
        return grant, recall

    def has_news(self, gateway: int) -> bool:
        """Whether `take` would say anything."""
        account = self._accounts[gateway]
        return bool(account.granting or account.recalling)

    def settle(self, waiting: Mapping[int, GatewayDemand]) -> None:
        """Grant what is free and ask back what is needed elsewhere; `waiting` has every attached gateway."""
        free = self._free()
        if free < 0:
            self._recall(-free - self._pending(), sorted(self._accounts, key=lambda g: waiting[g].requests > 0))
            return
        if len(self._accounts) == 1:  # nobody to weigh it against
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
            account.granting -= unsent  # never sent: free again without a round trip
            asked = min(count - unsent, account.held - account.recalling - account.recalled)
            account.recalling += asked
            count -= unsent + asked

    def _relieve(self, waiting: Mapping[int, GatewayDemand]) -> None:
        """A waiting gateway with nothing gets one from a less urgent one that waits too, but for something else."""
        accounts = self._accounts
        starving = [g for g in accounts if waiting[g].requests and not accounts[g].total]
        donors = [g for g, account in accounts.items() if account.held > account.recalling + account.recalled]
        if not starving or not donors or self._pending():
            return
        donor = max(donors, key=lambda g: waiting[g].urgency)
        if min(waiting[g].urgency for g in starving) < waiting[donor].urgency:
            accounts[donor].recalling += 1

    def _level(self, waiting: Mapping[int, GatewayDemand]) -> None:
        """Standing credits are spread evenly again, for one that came when all were handed out."""
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
    """Both kinds of slots of a worker: prompts to prefill, and sequences that decode."""

    def __init__(self) -> None:
        self.prefill = CreditPool(0)
        self.decode = CreditPool(0)
        self._pools = (self.prefill, self.decode)

    def resize(self, prefill_slots: int, decode_slots: int) -> None:
        """The role has changed."""
        self.prefill.slots, self.decode.slots = prefill_slots, decode_slots

    def attach(self, gateway: int) -> None:
        """A gateway has come."""
        for pool in self._pools:
            pool.attach(gateway)

    def detach(self, gateway: int) -> None:
        """It has gone, with what it held."""
        for pool in self._pools:
            pool.detach(gateway)

    def settle(self, waiting: Mapping[int, GatewayDemand]) -> Iterable[int]:
        """Decide who gets what; returns the gateways with news."""
        for pool in self._pools:
            pool.settle(waiting)
        return [gateway for gateway in waiting if self.has_news(gateway)]

    def has_news(self, gateway: int) -> bool:
        """Whether `take` would say anything."""
        return self.prefill.has_news(gateway) or self.decode.has_news(gateway)

    def take(self, gateway: int) -> tuple[int, int, int, int]:
        """(prefill grant, prefill recall, decode grant, decode recall) to tell the gateway now."""
        return *self.prefill.take(gateway), *self.decode.take(gateway)
