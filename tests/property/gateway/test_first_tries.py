"""Properties of the limit on workers that try a prompt before its first token."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.policy.gateway.suspicion import COMPUTED_NS, MAX_COMPUTED, MAX_LOST_WORKERS, FirstTries, Key

KEYS: tuple[Key, ...] = (("a", b"one"), ("a", b"two"), ("b", b"one"))


def let_go(tries: FirstTries[int], *waiting: int) -> list[int]:
    return list(filter(tries.round(), waiting))


def test_a_new_prompt_goes_to_two_workers_and_to_others_after_its_first_token() -> None:
    tries: FirstTries[int] = FirstTries()
    for number in range(5):
        tries.came(number, KEYS[0], 0)
    assert let_go(tries, 0, 1, 2, 3, 4) == [0, 1]
    tries.bound(0)
    tries.bound(1)
    assert let_go(tries, 2, 3, 4) == []
    assert tries.waiting_with(0) == [2, 3, 4]
    tries.waits(1)  # its worker is lost
    assert let_go(tries, 1, 2, 3, 4) == [1]
    tries.computed(KEYS[0], 0)
    assert let_go(tries, 1, 2, 3, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize(("after_ns", "go"), [(COMPUTED_NS - 1, 3), (COMPUTED_NS, 2)])
def test_a_prompt_with_a_recent_first_token_goes_anywhere_for_its_own_tenant(after_ns: int, go: int) -> None:
    tries: FirstTries[int] = FirstTries()
    tries.computed(("a", b"one"), 0)
    for number in range(3):
        tries.came(number, ("a", b"one"), after_ns)
        tries.came(number + 3, ("b", b"one"), after_ns)
    assert len(let_go(tries, 0, 1, 2)) == go
    assert let_go(tries, 3, 4, 5) == [3, 4], "its wait reveals nothing of another tenant's prompts"


def test_prompts_with_the_oldest_first_token_are_forgotten_first() -> None:
    tries: FirstTries[int] = FirstTries()
    for number in range(MAX_COMPUTED + 1):
        tries.computed(("a", b"%d" % number), 0)
    for number in range(3):
        tries.came(number, ("a", b"0"), 0)
        tries.came(number + 3, ("a", b"1"), 0)
    assert let_go(tries, 0, 1, 2, 3, 4, 5) == [0, 1, 3, 4, 5]


class AnyOrder(RuleBasedStateMachine):
    """Choices of two tenants with two prompts, moved as by a dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.tries: FirstTries[int] = FirstTries()
        self.keys: dict[int, Key] = {}
        self.waiting: list[int] = []
        self.on_workers: list[int] = []
        self.counted: set[int] = set()
        """The choices whose prompt had no recent token on arrival, and has had none since."""
        self.computed_ns: dict[Key, int] = {}
        self.now_ns = 0

    @rule(key=st.sampled_from(KEYS), count=st.integers(1, 5))
    def come(self, key: Key, count: int) -> None:
        for _ in range(count):
            choice = len(self.keys)
            self.keys[choice] = key
            self.waiting.append(choice)
            self.tries.came(choice, key, self.now_ns)
            if self.now_ns - self.computed_ns.get(key, -COMPUTED_NS) >= COMPUTED_NS:
                self.counted.add(choice)

    @rule(room=st.integers(0, 6))
    def bind(self, room: int) -> None:
        found = let_go(self.tries, *self.waiting)
        assert {*self.waiting} - {*found} <= self.counted
        for key in KEYS:
            waits = [each for each in self.waiting if self.keys[each] == key and each in self.counted]
            most = max(MAX_LOST_WORKERS - self.tried(key), 0)
            assert [each for each in found if each in waits] == waits[:most], "no choice waits in vain"
        for choice in found[:room]:
            self.waiting.remove(choice)
            self.on_workers.append(choice)
            self.tries.bound(choice)

    @precondition(lambda self: self.on_workers)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        choice = data.draw(st.sampled_from(self.on_workers))
        self.on_workers.remove(choice)
        self.waiting.append(choice)
        self.tries.waits(choice)

    @precondition(lambda self: self.on_workers)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        key = self.keys[data.draw(st.sampled_from(self.on_workers))]
        self.computed_ns[key] = self.now_ns
        self.tries.computed(key, self.now_ns)
        self.counted -= {choice for choice, each in self.keys.items() if each == key}

    @precondition(lambda self: self.waiting or self.on_workers)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        choice = data.draw(st.sampled_from(self.waiting + self.on_workers))
        (self.waiting if choice in self.waiting else self.on_workers).remove(choice)
        self.tries.ended(choice)
        self.counted.discard(choice)

    @rule(ns=st.integers(0, COMPUTED_NS))
    def time_passes(self, ns: int) -> None:
        self.now_ns += ns

    @invariant()
    def no_prompt_without_a_token_is_on_more_workers_than_it_may_take(self) -> None:
        assert all(self.tried(key) <= MAX_LOST_WORKERS for key in KEYS)

    @invariant()
    def those_that_wait_for_it_are_known(self) -> None:
        for choice in self.counted:
            same = {each for each in self.waiting if each in self.counted and self.keys[each] == self.keys[choice]}
            assert {*self.tries.waiting_with(choice)} == same

    def teardown(self) -> None:
        for choice in self.waiting + self.on_workers:
            self.tries.ended(choice)
        assert not self.tries, "ended choices leave no state"

    def tried(self, key: Key) -> int:
        return sum(self.keys[each] == key and each in self.counted for each in self.on_workers)


TestAnyOrder = AnyOrder.TestCase
