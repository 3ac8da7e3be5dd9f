"""Tests of planted situations on whole suites in virtual time: the verdict, and the effect of its advice."""

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
def test_the_planted_cause_is_named_first_and_soon(name):
    found = trial(name)
    assert found.right, (found.why, found.seen)
    assert found.named_s is not None
    assert found.named_s <= WITHIN_S


def test_a_busy_cluster_that_is_not_short_has_no_cause_and_fires_no_alert(busy):
    assert busy.right, (busy.why, busy.seen)
    assert busy.alerts == []


@pytest.mark.slow
def test_an_overload_stays_an_overload_once_the_gateways_queue_is_full():
    """From then on all arrivals are refused, and no waiting request can be in time."""
    found = run_lasting("too_small", 301, lasts_s=45.0)
    assert found.refused > 100
    assert found.right_s > 0.85 * sum(found.said_s.values()), found.changes
    assert found.changes[-1][1] == "too_small"


@pytest.mark.slow
def test_a_trial_is_repeatable(busy):
    assert trial("busy") == busy
