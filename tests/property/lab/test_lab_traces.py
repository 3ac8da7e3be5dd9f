"""Properties of traces under writing, reading, scaling, cutting and generation."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.lab.traces.describe import describe, dispersion, prefix_share
from libs.lab.traces.draws import gamma_ns, log_normal_tokens, on_off_ns, poisson_ns, swell_ns
from libs.lab.traces.formats import clock_tick_ms, spread_ns
from libs.lab.traces.generate import MAX_SESSION_TOKENS, SESSION_BLOCK_TOKENS, converse, generate
from libs.lab.traces.lines import MAX_NS
from libs.lab.traces.read import read_trace
from libs.lab.traces.recording import write_trace
from libs.lab.traces.request import Trace, TraceRequest
from libs.lab.traces.scaling import cut, scale_rate

tokens = st.integers(1, 100_000)
seeds = st.integers(0, 2**32)


@st.composite
def traces(draw, most_ns: int = 10**11) -> Trace:
    """Draw any trace, with turns of a session in order and prompts that share prefixes."""
    arrivals = sorted(draw(st.lists(st.integers(0, most_ns), max_size=30)))
    turns: Counter[int] = Counter()
    requests = []
    for number, arrival_ns in enumerate(arrivals):
        session = draw(st.integers(0, 3))
        requests.append(
            TraceRequest(
                number=number,
                arrival_ns=arrival_ns,
                input_tokens=draw(tokens),
                output_tokens=draw(tokens),
                hash_ids=tuple(draw(st.lists(st.integers(0, 5), max_size=4))),
                max_output_tokens=draw(st.integers(0, 10_000)),
                model=draw(st.text(max_size=5)),
                tenant=draw(st.text(max_size=5)),
                service_class=draw(st.sampled_from(["", "chat"])),
                session=session,
                turn=turns[session] if session else 0,
                think_ns=draw(st.integers(0, 10**10)) if session and turns[session] else 0,
            )
        )
        turns[session] += 1
    notes = tuple(draw(st.lists(st.text(max_size=10), max_size=2)))
    return Trace(draw(st.text(max_size=8)), tuple(requests), draw(st.integers(1, 512)), notes)


def is_sound(trace: Trace) -> None:
    """Check that requests are numbered and in order, and that turns of each session count from 0."""
    assert [each.number for each in trace.requests] == list(range(len(trace.requests)))
    arrivals = [each.arrival_ns for each in trace.requests]
    assert arrivals == sorted(arrivals)
    assert not arrivals or arrivals[0] >= 0
    turns: dict[int, list[int]] = defaultdict(list)
    for each in trace.requests:
        if each.session:
            turns[each.session].append(each.turn)
            assert each.turn or not each.think_ns
    assert all(each == list(range(len(each))) for each in turns.values())


def bare(request: TraceRequest) -> tuple[object, ...]:
    """Return the parts that scaling and cutting leave unchanged."""
    return request.input_tokens, request.output_tokens, request.max_output_tokens, request.model, request.service_class


@given(traces(most_ns=MAX_NS), st.sampled_from(["t.jsonl", "t.jsonl.gz", "t.csv"]), seeds)
def test_a_written_trace_is_read_back_unchanged(trace, name, seed):
    with TemporaryDirectory() as folder:
        write_trace(trace, f"{folder}/{name}")
        assert read_trace(f"{folder}/{name}", seed=seed) == trace


@given(traces(), st.floats(0.01, 100))
def test_compression_changes_only_times(trace, factor):
    found = scale_rate(trace, factor, "compress", 1)
    is_sound(found)
    assert [replace(each, arrival_ns=0, think_ns=0) for each in found.requests] == [
        replace(each, arrival_ns=0, think_ns=0) for each in trace.requests
    ]
    assert found.duration_ns == pytest.approx(trace.duration_ns / factor, abs=1)
    assert "compression" in found.notes[-1]


@given(traces(), st.integers(1, 4), seeds)
def test_superposition_lays_whole_copies_over_the_first_within_its_time(trace, factor, seed):
    found = scale_rate(trace, factor, "superpose", seed)
    is_sound(found)
    assert Counter(map(bare, found.requests)) == Counter(
        {what: count * factor for what, count in Counter(map(bare, trace.requests)).items()}
    )
    kept = Counter(replace(each, number=0) for each in found.requests)
    assert all(kept[replace(each, number=0)] for each in trace.requests), "the first copy is the trace itself"
    if trace.requests:
        gap_ns = max(trace.duration_ns // max(len(trace.requests) - 1, 1), 1)
        assert found.requests[-1].arrival_ns < trace.requests[-1].arrival_ns + gap_ns
    assert found == scale_rate(trace, factor, "superpose", seed)


@given(traces(), seeds)
def test_copies_share_no_prefix(trace, seed):
    found = scale_rate(trace, 3, "superpose", seed)
    first = Counter(each for request in trace.requests for each in request.hash_ids)
    ids = Counter(each for request in found.requests for each in request.hash_ids)
    assert len(ids) == 3 * len(first)
    assert sorted(ids.values()) == sorted(3 * list(first.values()))


@given(traces(), st.floats(0.05, 0.95), seeds)
def test_a_fraction_contains_whole_conversations(trace, factor, seed):
    found = scale_rate(trace, factor, "superpose", seed)
    is_sound(found)
    sizes = Counter(each.session for each in trace.requests)
    assert all(
        count == sizes[session] for session, count in Counter(r.session for r in found.requests).items() if session
    )


@given(st.floats(0.1, 3.5), seeds)
@settings(max_examples=20)
def test_a_scaled_trace_has_about_that_many_requests(factor, seed):
    trace = Trace("t", tuple(TraceRequest(n, n * 1000, 1, 1) for n in range(2000)))
    count = len(scale_rate(trace, factor, "superpose", seed).requests)
    assert abs(count - 2000 * factor) <= 6 * math.sqrt(2000 / 4)


@given(traces(), st.floats(0, 100), st.floats(0.001, 100))
def test_a_cut_contains_exactly_its_arrivals(trace, start_s, seconds):
    found = cut(trace, start_s, seconds)
    is_sound(found)
    start_ns, length_ns = round(start_s * 1e9), round(seconds * 1e9)
    inside = [each for each in trace.requests if start_ns <= each.arrival_ns < start_ns + length_ns]
    assert [bare(each) for each in found.requests] == [bare(each) for each in inside]
    assert [each.arrival_ns + start_ns for each in found.requests] == [each.arrival_ns for each in inside]


@given(traces(), st.integers(1, 10**10))
def test_dispersion_is_that_of_counts_in_complete_windows(trace, window_ns):
    window_ns = max(window_ns, 10**8)
    windows = trace.requests[-1].arrival_ns // window_ns if trace.requests else 0
    counts = [0] * windows
    for each in trace.requests:
        if each.arrival_ns // window_ns < windows:
            counts[each.arrival_ns // window_ns] += 1
    found = dispersion(trace, window_ns)
    if windows < 2 or not sum(counts):
        assert math.isnan(found)
    else:
        assert found == pytest.approx(np.var(counts) / np.mean(counts), abs=1e-6)


@given(traces())
def test_any_trace_can_be_described(trace):
    found = describe(trace)
    assert found["requests"] == len(trace.requests) == sum(found["classes"].values())
    assert 0 <= found["prefix_share"] <= 1
    assert prefix_share(replace(trace, requests=trace.requests[:1])) == 0


busy = st.lists(st.integers(0, 30), min_size=10, max_size=80).filter(lambda each: each[0] > 1 and each.count(0) < 5)


@given(st.integers(100, 20_000), busy, st.data())
def test_a_coarse_clock_is_detected_and_arrivals_stay_in_order_and_in_their_tick(tick_ms, counts, data):
    off = data.draw(st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts)))
    stamps = [tick * tick_ms + off[tick] for tick, count in enumerate(counts) for _ in range(count)]
    found = clock_tick_ms(stamps)
    filled = [tick for tick, count in enumerate(counts) if count]
    gaps = np.diff(filled)
    # A clock whose adjacent ticks hardly ever both have requests cannot be distinguished from a slower one.
    if np.quantile(gaps, 0.1) == 1:
        assert abs(found - tick_ms) <= 1
    if found:
        arrivals = spread_ns(stamps, found, np.random.default_rng(1))
        assert arrivals == sorted(arrivals)
        for stamp, arrival_ns in zip(stamps, arrivals, strict=True):
            assert -11 <= arrival_ns / 1e6 - stamp <= found + 11


@given(seeds)
@settings(max_examples=10)
def test_arrivals_come_in_order_within_their_time_at_their_rate(seed):
    def rng():
        return np.random.default_rng(seed)

    for times_ns, mean, wide in (
        (poisson_ns(rng(), 20, 100), 2000, 1),
        (gamma_ns(rng(), 20, 3, 100), 2000, 3),
        (gamma_ns(rng(), 20, 0.2, 100), 2000, 1),
        (on_off_ns(rng(), 20, 0.5, 0.5, 100), 2000, 4),
        (swell_ns(rng(), 40, 100), 2000, 1),
    ):
        assert np.all(np.diff(times_ns) >= 0)
        assert times_ns[0] >= 0
        assert times_ns[-1] < 100e9
        assert abs(len(times_ns) - mean) < 6 * wide * math.sqrt(mean)


@given(st.floats(20, 10_000), st.floats(0, 1.2), seeds)
@settings(max_examples=20)
def test_lengths_have_their_mean_and_are_at_least_one(mean, spread, seed):
    found = log_normal_tokens(np.random.default_rng(seed), mean, spread, 20_000)
    assert found.min() >= 1
    assert found.mean() == pytest.approx(mean, rel=0.1)


@given(
    st.sampled_from(["poisson", "gamma:cv=4", "onoff", "flipflop:period=3", "chat-flood", "evening-writing", "both"]),
    st.sampled_from(["", "sessions=7,think=2"]),
    seeds,
)
@settings(max_examples=40, deadline=None)
def test_a_spec_and_a_seed_give_one_valid_trace(kind, sessions, seed):
    if kind.startswith("flipflop"):
        sessions = ""
    kind += ":" if ":" not in kind else ","
    spec = kind + ",".join(filter(None, ["seconds=90,rate=3", sessions]))
    found = generate(spec, seed=seed)
    is_sound(found)
    assert found == generate(spec, seed=seed)
    assert found.requests != generate(spec, seed=seed + 1).requests
    assert found.requests[-1].arrival_ns < 90e9


@given(st.integers(1, 20), st.floats(1, 30), st.floats(0, 60), st.integers(1, 5000), seeds)
@settings(max_examples=50, deadline=None)
def test_each_turn_contains_the_conversation_so_far(open_sessions, turns, think_s, mean, seed):
    rng = np.random.default_rng(seed)
    lengths = log_normal_tokens(rng, mean, 0.8, 200).tolist()
    alone = [TraceRequest(n, n * 10**9, length, length // 3 + 1) for n, length in enumerate(lengths)]
    found = converse(alone, rng, open_sessions=open_sessions, turns=turns, think_s=think_s)
    is_sound(Trace("t", found, SESSION_BLOCK_TOKENS))
    before: dict[int, TraceRequest] = {}
    owner: dict[int, int] = {}
    for one, each in zip(alone, found, strict=True):
        earlier = before.get(each.session)
        history = earlier.input_tokens + earlier.output_tokens if earlier else 0
        assert each.input_tokens == history + one.input_tokens
        assert each.output_tokens == one.output_tokens
        assert not each.turn or each.input_tokens + each.output_tokens <= MAX_SESSION_TOKENS
        assert len(each.hash_ids) == each.input_tokens // SESSION_BLOCK_TOKENS
        if earlier:
            assert each.hash_ids[: len(earlier.hash_ids)] == earlier.hash_ids
        assert all(owner.setdefault(hash_id, each.session) == each.session for hash_id in each.hash_ids)
        before[each.session] = each
    assert {each.session for each in found} == set(range(1, len(before) + 1))
