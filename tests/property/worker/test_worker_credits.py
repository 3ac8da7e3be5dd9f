"""Properties of credits under every interleaving of gateways that use, return, come, go and wait."""

from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.policy.gateway.outlook import CreditBalance
from libs.policy.worker.credits import CreditPool, GatewayDemand
from libs.testing.examples import examples

MAX_ROUNDS = 400
STEPS = ("take", "hear", "bind", "reserve", "use reserved", "release", "deliver")


@dataclass
class Gateway:
    """A gateway that plays by the protocol, with messages in flight both ways."""

    name: str
    waiting: int = 0
    deadline: int = 0
    balance: CreditBalance = field(default_factory=CreditBalance)
    inbox: deque[tuple[int, int]] = field(default_factory=deque)
    outbox: deque[tuple[str, int]] = field(default_factory=deque)

    def hear(self) -> None:
        grant, recall = self.inbox.popleft()
        self.balance.recall(recall)
        self.answer()
        self.balance.grant(grant)

    def answer(self) -> None:
        """Answer as a link does whenever a credit may have become free."""
        for kind, count in (("return", self.balance.give_back()), ("spent", self.balance.take_spent())):
            if count:
                self.outbox.append((kind, count))

    def bind(self) -> None:
        self.balance.use()
        self.waiting -= 1
        self.outbox.append(("use", 1))
        self.answer()

    def reserve(self) -> None:
        self.balance.reserve()
        self.waiting -= 1

    def use_reserved(self) -> None:
        self.balance.use_reserved()
        self.outbox.append(("use", 1))
        self.answer()

    def release(self) -> None:
        self.balance.release()
        self.answer()


class Credits(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = CreditPool(slots=3)
        self.gateways: dict[int, Gateway] = {}
        self.orphans = 0
        self.next_id = 0
        self.bound = 3

    def settle(self) -> None:
        self.pool.settle({i: GatewayDemand(g.name, g.waiting, g.deadline) for i, g in self.gateways.items()})

    def deliver(self, i: int) -> None:
        kind, count = self.gateways[i].outbox.popleft()
        if kind == "use":
            assert self.pool.use(i), "a told credit is never void"
        elif kind == "return":
            self.pool.returned(i, count)
        else:
            self.pool.spent(i, count)

    @rule()
    @precondition(lambda self: len(self.gateways) < 4)
    def attach(self) -> None:
        self.gateways[self.next_id] = Gateway(f"gateway-{self.next_id}")
        self.pool.attach(self.next_id)
        self.next_id += 1
        self.settle()

    @rule(data=st.data())
    @precondition(lambda self: self.gateways)
    def detach(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from(sorted(self.gateways)))
        del self.gateways[i]
        self.pool.detach(i)
        self.settle()

    @rule(data=st.data(), count=st.integers(1, 5), deadline=st.integers(0, 9))
    @precondition(lambda self: self.gateways)
    def requests_come(self, data: st.DataObject, count: int, deadline: int) -> None:
        gateway = self.gateways[data.draw(st.sampled_from(sorted(self.gateways)))]
        gateway.waiting += count
        gateway.deadline = deadline
        self.settle()

    @rule(data=st.data(), step=st.sampled_from(STEPS))
    @precondition(lambda self: self.gateways)
    def one_step(self, data: st.DataObject, step: str) -> None:
        self.act(data.draw(st.sampled_from(sorted(self.gateways))), step)

    def act(self, i: int, step: str) -> None:
        gateway = self.gateways[i]
        if step == "take" and self.pool.has_news(i):
            gateway.inbox.append(self.pool.take(i))
        elif step == "hear" and gateway.inbox:
            gateway.hear()
        elif step == "bind" and gateway.balance.free and gateway.waiting:
            gateway.bind()
        elif step == "reserve" and gateway.balance.free and gateway.waiting:
            gateway.reserve()
        elif step == "use reserved" and gateway.balance.reserved:
            gateway.use_reserved()
        elif step == "release" and gateway.balance.reserved:
            gateway.release()
        elif step == "deliver" and gateway.outbox:
            self.deliver(i)
            self.settle()

    @rule()
    @precondition(lambda self: self.pool.in_use)
    def a_sequence_ends(self) -> None:
        self.pool.free()
        self.settle()

    @rule(slots=st.integers(0, 6))
    def role_changes(self, slots: int) -> None:
        self.bound = max(slots, self.pool.in_use + self.pool.granted)
        self.pool.slots = slots
        self.settle()

    @rule()
    def everyone_who_waits_is_served_in_the_end(self) -> None:
        self.pool.slots = max(self.pool.slots, 1)
        self.bound = max(self.bound, self.pool.slots)
        self.settle()
        for _ in range(MAX_ROUNDS):
            if not any(gateway.waiting for gateway in self.gateways.values()):
                return
            for i in sorted(self.gateways):
                for step in ("take", "hear", "use reserved", "bind", *["deliver"] * 4):
                    self.act(i, step)
            if self.pool.in_use:
                self.a_sequence_ends()
        raise AssertionError(f"still waiting: {self.gateways} {self.pool}")

    @invariant()
    def never_more_credits_than_slots(self) -> None:
        total = self.pool.in_use + self.pool.granted
        assert total <= self.bound
        self.bound = max(total, self.pool.slots)
        assert self.pool.granted >= 0

    @invariant()
    def nothing_stays_free_while_someone_is_there(self) -> None:
        if self.gateways:
            assert self.pool.in_use + self.pool.granted >= self.pool.slots


Credits.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestCredits = Credits.TestCase
