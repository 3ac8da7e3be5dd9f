"""Tests that the lab decides and times like the real code, and of the tools that compare the two."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.lab.traces.generate import generate
from libs.lab.traces.request import Trace, TraceRequest
from libs.policy.roles import Role
from load.lab.bench_lab_fidelity import EVEN_STORE_MS, MEAN_HOP_MS, sim_replay
from load.lab.fidelity import (
    DECODE,
    HOPS,
    LLAMA_70B,
    PREFILL,
    TWO_AND_TWO,
    Case,
    Constants,
    Replay,
    Served,
    as_it_came,
    calibrate,
    compare,
    lab_replay,
    line,
    pooled,
    prompt_ids,
    verdict,
)

CASES = {
    "one of each": Case("poisson:rate=8,isl=1500,osl=60,seconds=6", LLAMA_70B, [PREFILL, DECODE]),
    "a choice of both": Case("poisson:rate=12,isl=1500,osl=60,seconds=6", LLAMA_70B, TWO_AND_TWO),
    "shared prefixes": Case("poisson:rate=8,isl=500,osl=60,seconds=8,sessions=6,think=1", LLAMA_70B, TWO_AND_TWO),
    "few places": Case("poisson:rate=10,isl=800,osl=100,seconds=6", LLAMA_70B, TWO_AND_TWO, max_sequences=8),
    "mixed": Case("poisson:rate=4,isl=1000,osl=60,seconds=8", LLAMA_70B, [(Role.MIXED, 512)] * 2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_lab_places_and_times_every_request_like_the_real_code(case: Case) -> None:
    place, trace = case.place(), generate(case.trace, seed=3)
    real = sim_replay(place, trace, hop_ms=MEAN_HOP_MS)
    lab = lab_replay(place, as_it_came(trace, real), Constants(MEAN_HOP_MS, EVEN_STORE_MS))
    found = compare("", real, lab, len(trace.requests))
    assert found.requests == len(trace.requests) > 20
    assert (found.same_prefill, found.same_decode, found.same_times) == (1.0, 1.0, 1.0)
    assert found.cached_tokens[0] == found.cached_tokens[1]
    assert "sessions" not in case.trace or found.cached_tokens[0]


def test_calibration_recovers_the_constants_of_a_run() -> None:
    place, trace = CASES["one of each"].place(), generate("poisson:rate=4,isl=800,osl=40,seconds=30", seed=1)
    had = Constants(3.0, 1.0, 0.4, 2.0)
    found = calibrate(place, trace, lab_replay(place, trace, had), Constants(1.0, 1.0))
    assert found.step_ms == pytest.approx(had.step_ms, abs=0.1)
    assert HOPS * found.hop_ms + found.gateway_ms == pytest.approx(HOPS * had.hop_ms + had.gateway_ms, abs=0.2)


@given(st.floats(-5, 5), st.floats(-2, 2), st.lists(st.integers(1, 50), min_size=2, max_size=20))
def test_points_on_a_line_give_the_line(at_0: float, slope: float, places: list[int]) -> None:
    found = line([(x, at_0 + slope * x) for x in places])
    if len(set(places)) > 1 and np.median(places) < max(places):
        assert found == pytest.approx((at_0, slope), abs=1e-6)
    else:
        assert found[0] == 0.0


served = st.builds(
    Served,
    arrival_ns=st.integers(0, 10**12),
    ttft_ns=st.floats(1e5, 1e11),
    tpot_ns=st.floats(1e5, 1e9),
    prefill_worker=st.sampled_from(["w0", "w1"]),
    decode_worker=st.sampled_from(["w2", "w3"]),
    cached_tokens=st.integers(0, 100),
)
replays = st.builds(Replay, st.dictionaries(st.integers(0, 99), served, min_size=1, max_size=20), st.integers(0, 3))


def trace_of(numbers: list[int]) -> Trace:
    return Trace("drawn", [TraceRequest(number, at, 5, 2) for at, number in enumerate(numbers)], 0)


@given(replays)
def test_a_run_does_not_differ_from_itself(run: Replay) -> None:
    found = compare("", run, run, len(run.served) + 2)
    assert found.failed == 2
    assert (found.same_prefill, found.same_decode, found.same_times) == (1.0, 1.0, 1.0)
    assert set(found.ttft.difference.values()) == set(found.tpot.difference.values()) == {0.0}


@given(replays, st.floats(0.5, 2.0))
def test_differences_are_fractions_of_the_first_run(run: Replay, times: float) -> None:
    other = replace(run, served={n: replace(each, ttft_ns=each.ttft_ns * times) for n, each in run.served.items()})
    found = compare("", run, other, len(run.served))
    assert list(found.ttft.difference.values()) == pytest.approx([times - 1] * 3, abs=1e-9)
    assert found.ttft.mean_gap_ms == pytest.approx(found.ttft.first_ms["mean"] * (times - 1), abs=1e-6)


@given(replays, replays)
def test_only_requests_of_both_runs_are_compared(one: Replay, other: Replay) -> None:
    both = one.served.keys() & other.served.keys()
    if both:
        found = compare("", one, other, 200)
        assert (found.requests, found.failed) == (len(both), 200 - len(both))
        assert found.ttft.first_ms["mean"] == pytest.approx(np.mean([one.served[n].ttft_ns for n in both]) / 1e6)


@given(st.lists(replays, min_size=1, max_size=3))
def test_merged_runs_contain_every_request_of_each(runs: list[Replay]) -> None:
    together = pooled(runs)
    assert sorted(each.ttft_ns for each in together.served.values()) == sorted(
        each.ttft_ns for run in runs for each in run.served.values()
    )


@given(replays)
def test_a_recorded_trace_starts_at_zero_in_order_of_arrival(run: Replay) -> None:
    came = as_it_came(trace_of([*run.served, 1000]), run)
    arrivals = [each.arrival_ns for each in came.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    assert {each.number for each in came.requests} == run.served.keys()


@given(replays, st.floats(0.9, 1.1), st.floats(0.9, 1.1))
def test_the_allowed_error_of_the_lab_is_the_aim_or_one_and_a_half_times_the_spread(
    run: Replay, lab_times: float, live_times: float
) -> None:
    def slower(times: float) -> Replay:
        return replace(run, served={n: replace(each, tpot_ns=each.tpot_ns * times) for n, each in run.served.items()})

    lab, live = compare("", run, slower(lab_times), 0), compare("", run, slower(live_times), 0)
    found = verdict(lab, [live])["tpot mean"]
    assert found["allowed"] == pytest.approx(max(0.01, 1.5 * abs(live_times - 1)))
    assert found["off"] == pytest.approx(lab_times - 1)
    assert found["met"] == (abs(found["off"]) <= found["allowed"])
    assert verdict(lab, [])["tpot mean"]["allowed"] == 0.01


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=2, max_size=6), st.integers(0, 40))
def test_prompts_share_exactly_the_blocks_whose_ids_they_share(ids: list[list[int]], more: int) -> None:
    requests = [TraceRequest(n, n, len(each) * 16 + more + 1, 2, each) for n, each in enumerate(ids)]
    prompts = prompt_ids(Trace("drawn", requests, 16))
    assert [len(prompt) for prompt in prompts] == [each.input_tokens for each in requests]
    for one, first in zip(ids, prompts, strict=True):
        for other, second in zip(ids, prompts, strict=True):
            shared = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
            blocks = min(len(one), len(other)) if shared is None else shared
            assert first[: blocks * 16] == second[: blocks * 16]
            assert shared is None or first[shared * 16 : shared * 16 + 16] != second[shared * 16 : shared * 16 + 16]
