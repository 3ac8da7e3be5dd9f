"""Tests of generated traces: the shape of each kind, and refused specs."""

import numpy as np
import pytest

from libs.contracts.errors import InvalidRequest
from libs.lab.traces.describe import describe, dispersion
from libs.lab.traces.generate import CHAT, KINDS, LONG_PROMPT, WRITING, generate


def test_a_spec_sets_rate_lengths_and_duration():
    found = describe(generate("poisson:rate=5,isl=1000,osl=200,seconds=600", seed=7))
    assert found["rate_per_s"] == pytest.approx(5, rel=0.1)
    assert found["input_tokens"]["mean"] == pytest.approx(1000, rel=0.1)
    assert found["output_tokens"]["mean"] == pytest.approx(200, rel=0.1)
    assert found["duration_s"] == pytest.approx(600, rel=0.02)
    assert found["classes"] == {CHAT: found["requests"]}


def test_a_spread_of_zero_makes_all_lengths_equal():
    found = generate("poisson:isl=100,osl=7,spread=0", seed=1)
    assert {(each.input_tokens, each.output_tokens) for each in found.requests} == {(100, 7)}


def test_burstier_processes_have_more_dispersion():
    second = 1_000_000_000
    regular, poisson, bursts, on_off = (
        dispersion(generate(f"{kind},rate=20,seconds=1000", seed=3), 10 * second)
        for kind in ("gamma:cv=0.2", "poisson:spread=0.8", "gamma:cv=4", "onoff:on=5,off=15")
    )
    assert regular < 0.3 < poisson < 1.7 < bursts < on_off
    assert poisson == pytest.approx(1, abs=0.5)


def test_flipflop_alternates_prefill_heavy_and_decode_heavy_halves():
    found = generate("flipflop:period=20,rate=20,isl=800,osl=200,swing=4,seconds=400", seed=1).requests
    for each in found:
        assert each.service_class == (LONG_PROMPT if each.arrival_ns % 20e9 < 10e9 else WRITING)
    long, writing = ([each for each in found if each.service_class == name] for name in (LONG_PROMPT, WRITING))
    assert np.mean([each.input_tokens for each in long]) == pytest.approx(3200, rel=0.1)
    assert np.mean([each.input_tokens for each in writing]) == pytest.approx(200, rel=0.1)
    assert np.mean([each.output_tokens for each in long]) == pytest.approx(50, rel=0.1)
    assert np.mean([each.output_tokens for each in writing]) == pytest.approx(800, rel=0.1)


def test_a_chat_is_flooded_with_long_prompts_for_a_minute():
    found = generate("chat-flood:seconds=300,flood_rate=5,flood_at=0.4", seed=1).requests
    flood = [each.arrival_ns / 1e9 for each in found if each.service_class == LONG_PROMPT]
    assert 120 <= min(flood) < max(flood) < 180
    assert len(flood) == pytest.approx(300, rel=0.25)


def test_an_evening_of_writing_rises_and_falls():
    found = generate("evening-writing:seconds=3600", seed=1).requests
    by_third = np.histogram([r.arrival_ns / 1e9 for r in found if r.service_class == WRITING], 3, (0, 3600))[0]
    assert by_third[1] > 2 * max(by_third[0], by_third[2])


def test_the_chat_load_does_not_depend_on_other_load():
    def chat(spec: str) -> list[tuple[int, int]]:
        return [(r.arrival_ns, r.input_tokens) for r in generate(spec, seed=1).requests if r.service_class == CHAT]

    both = generate("both:seconds=900", seed=1)
    assert {each.service_class for each in both.requests} == {CHAT, LONG_PROMPT, WRITING}
    assert chat("both:seconds=900") == chat("chat-flood:seconds=900,flood_rate=9") == chat("poisson:seconds=900")


def test_conversations_have_the_requested_think_time_and_share_prefixes():
    found = generate("poisson:rate=2,isl=300,sessions=60,think=12,turns=6,seconds=3000", seed=1)
    later = [each for each in found.requests if each.turn]
    assert np.mean([each.think_ns / 1e9 for each in later]) == pytest.approx(12, rel=0.1)
    count = len({each.session for each in found.requests})
    assert len(found.requests) / count == pytest.approx(6, rel=0.2)
    assert found.block_tokens
    assert describe(found)["prefix_share"] > 0.5


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("poisson:rat=5", "rat"),
        ("poisson:rate=x", "rate"),
        ("poisson:rate=-1", "rate"),
        ("poisson:rate=nan", "rate"),
        ("poisson:rate=1e999", "rate"),
        ("poisson:rate=5,rate=6", "rate"),
        ("poisson:rate", "rate"),
        ("poisson:cv=2", "cv"),
        ("flipflop:period=0.5", "period"),
        ("flipflop:period=61", "period"),
        ("flipflop:sessions=3", "sessions"),
    ],
)
def test_an_invalid_parameter_is_named_and_the_valid_ones_are_listed(spec, named):
    with pytest.raises(InvalidRequest) as caught:
        generate(spec, seed=1)
    assert caught.value.param == named
    assert named in caught.value.message
    for each in KINDS[spec.partition(":")[0]]:
        assert str(each) in caught.value.message


def test_an_unknown_kind_is_refused_with_the_existing_ones():
    with pytest.raises(InvalidRequest, match=f"'poison'.*{', '.join(KINDS)}"):
        generate("poison:rate=5", seed=1)


def test_a_trace_of_too_many_requests_or_none_is_refused():
    with pytest.raises(InvalidRequest, match="a trace has at most"):
        generate("poisson:rate=1e5,seconds=1e6", seed=1)
    with pytest.raises(InvalidRequest, match="gives no request"):
        generate("poisson:rate=0.0001,seconds=1", seed=1)
