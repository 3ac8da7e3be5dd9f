"""Planted situations on whole suites in virtual time: what the verdict names, and what its advice brings."""

import pytest

from load.verdict.situations import Situations, draw_suite
from load.verdict.virtual import WITHIN_S, run_lasting, run_trial

SEED = 7


def trial(name, number=0, *, little_kv=False, apply=False):
    drawn = draw_suite(SEED, little_kv=little_kv)
    seed = SEED * 1_000 + number
    return run_trial(drawn, Situations(drawn.device, seed).of(name), seed, apply=apply)


@pytest.fixture(scope="module")
def busy():
    return trial("busy")


@pytest.mark.parametrize("name", ["slow_link", "decode_bound_tpot"])
def test_what_is_planted_is_named_first_and_soon(name):
    found = trial(name)
    assert found.right, (found.why, found.seen)
    assert found.named_s is not None
    assert found.named_s <= WITHIN_S


def test_what_is_busy_and_not_short_is_named_nothing_and_raises_no_alert(busy):
    assert busy.right, (busy.why, busy.seen)
    assert busy.alerts == []


@pytest.mark.slow
def test_overload_stays_overload_once_the_gateways_queue_is_full():
    """From then on all that come are refused, and none that waits can be in time."""
    found = run_lasting("too_small", 301, lasts_s=45.0)
    assert found.refused > 100
    assert found.right_s > 0.85 * sum(found.said_s.values()), found.changes
    assert found.changes[-1][1] == "too_small"


@pytest.mark.slow
def test_a_trial_is_the_same_whenever_it_is_run(busy):
    assert trial("busy") == busy
