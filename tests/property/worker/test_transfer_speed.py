"""Properties of the KV link's speed that a worker learns from transfers of any length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.reports import KvTransferReport
from libs.policy.worker.handing_over import LEAST_TRANSFERS, LINK_FORGETS, MIN_TRANSFER_BLOCKS, TransferSpeed

BLOCK = 16
transfers = st.lists(st.tuples(st.integers(0, 200), st.integers(-5, 10**9)), max_size=30)


@given(transfers, st.integers(MIN_TRANSFER_BLOCKS, 200), st.integers(1, 10**9))
def test_a_faster_transfer_counts_at_once_and_a_slower_one_little(
    before: list[tuple[int, int]], blocks: int, duration_ns: int
) -> None:
    speed = TransferSpeed(BLOCK)
    for each in before:
        speed.arrived(*each)
    known_ns, token_ns = speed.token_ns, duration_ns / (blocks * BLOCK)
    speed.arrived(blocks, duration_ns)
    assert speed.token_ns == (min(token_ns, known_ns * LINK_FORGETS) if known_ns else token_ns)


@given(transfers)
def test_short_transfers_and_those_without_a_duration_are_ignored(before: list[tuple[int, int]]) -> None:
    speed = TransferSpeed(BLOCK)
    for blocks, duration_ns in before:
        speed.arrived(blocks, min(duration_ns, 0) if blocks >= MIN_TRANSFER_BLOCKS else duration_ns)
    assert speed.token_ns == 0
    assert not speed.differs(0.0)


def test_the_speed_is_reported_again_once_it_differs_by_a_twentieth() -> None:
    speed = TransferSpeed(BLOCK)
    speed.arrived(10, 10 * BLOCK * 100)
    assert speed.token_ns == 100
    assert speed.differs(0.0)
    assert [speed.differs(reported_ns) for reported_ns in (94.0, 96.0, 105.0, 106.0)] == [True, False, False, True]


def test_a_link_is_not_judged_by_its_first_transfers() -> None:
    speed = TransferSpeed(BLOCK)
    settled = []
    for _ in range(LEAST_TRANSFERS):
        speed.arrived(MIN_TRANSFER_BLOCKS - 1, 1_000)  # says nothing
        speed.arrived(MIN_TRANSFER_BLOCKS, 64_000)
        settled.append(speed.settled_token_ns)
    assert settled == [0.0] * (LEAST_TRANSFERS - 1) + [speed.token_ns]


@pytest.mark.parametrize(
    ("prompt_tokens", "ready_ns", "link_ns"),
    [
        pytest.param(7_000, 80, 80, id="computed in several steps: the time in which ready KV was on its way"),
        pytest.param(500, 0, 1_000, id="ready before it was asked for: all of it"),
        pytest.param(500, 900, 1_000, id="ready for most of the time: all of it"),
        pytest.param(500, 80, 0, id="computed meanwhile in one step: nothing is known"),
    ],
)
def test_the_time_on_the_link_excludes_the_computation_of_the_prompt(
    prompt_tokens: int, ready_ns: int, link_ns: int
) -> None:
    report = KvTransferReport("r", "p", 10, 0, 5, 1_005, prompt_tokens, 0, ready_ns=ready_ns)
    assert report.link_ns(chunk_tokens=2_048) == link_ns
