"""Properties of the block pool under any schedule: no leak, no double use, exact counts, safe eviction."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.engine.kv_blocks import BlockPool
from libs.testing.examples import examples

BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Holders allocate, share, register and release; a model beside the pool counts what each holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.held: list[list[int]] = []
        self.listed: set[bytes] = set()
        """The reusable hashes as a reader of the pool's changes knows them."""

    def chain(self, name: int, length: int) -> list[bytes]:
        return [b"%d:%d" % (name, place) for place in range(length)]

    @rule(name=st.integers(0, 3), length=st.integers(0, 6), extra=st.integers(0, 6))
    def admit(self, name: int, length: int, extra: int) -> None:
        chain = self.chain(name, length)
        shared = self.pool.match(chain)
        before = [self.pool.references(block) for block in range(BLOCKS)]
        idle = sum(not before[block] for block in shared)
        need = length - len(shared) + extra
        possible = need <= self.pool.available - idle
        blocks = self.pool.allocate(need, shared)
        assert (blocks is not None) == possible
        if blocks is None:
            assert before == [self.pool.references(block) for block in range(BLOCKS)]
            return
        assert blocks[: len(shared)] == shared
        assert len(set(blocks)) == len(blocks) == length + extra
        assert all(not before[block] for block in blocks[len(shared) :]), "a new block was in use"
        for block, content in zip(blocks, chain, strict=False):
            self.pool.register(block, content)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index))

    @rule()
    def read_changes(self) -> None:
        changes = self.pool.take_changes()
        assert not set(changes.stored) & self.listed
        assert set(changes.removed) <= self.listed
        self.listed = (self.listed | set(changes.stored)) - set(changes.removed)
        for name in range(4):
            reusable = len(self.pool.match(self.chain(name, 6)))
            assert {content in self.listed for content in self.chain(name, reusable)} <= {True}

    @invariant()
    def counts_are_right(self) -> None:
        for block in range(BLOCKS):
            assert self.pool.references(block) == sum(block in blocks for blocks in self.held)
        assert self.pool.referenced == len({block for blocks in self.held for block in blocks})
        assert self.pool.available + self.pool.referenced == BLOCKS

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.release(blocks)
        assert self.pool.referenced == 0
        everything = self.pool.allocate(BLOCKS)
        assert everything is not None and sorted(everything) == list(range(BLOCKS))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


def test_releasing_twice_is_refused() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="not held"):
        pool.release(blocks)


def test_the_least_recently_used_chain_is_evicted_first_and_from_its_end() -> None:
    pool = BlockPool(4)
    for name in (b"a", b"b"):
        blocks = pool.allocate(2)
        assert blocks is not None
        for place, block in enumerate(blocks):
            pool.register(block, name + b"%d" % place)
        pool.release(blocks)
    assert pool.allocate(1) is not None
    assert [len(pool.match([name + b"0", name + b"1"])) for name in (b"a", b"b")] == [1, 2]


def test_two_holders_of_a_prefix_share_its_blocks() -> None:
    pool = BlockPool(200)
    hashes = [b"%d" % index for index in range(87)]
    first = pool.allocate(88)
    assert first is not None
    for block, content in zip(first, hashes, strict=False):
        pool.register(block, content)
    second = pool.allocate(1, pool.match(hashes))
    assert second is not None and second[:87] == first[:87]
    assert pool.referenced == 89
