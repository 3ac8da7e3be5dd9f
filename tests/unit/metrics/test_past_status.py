"""Tests of the status over time in rings."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.metrics.status.past import (
    MAX_MODELS,
    TIERS,
    ModelPoint,
    Rings,
    StatusRecorder,
    StoodVerdict,
    TrafficPoint,
)

S_NS = 1_000_000_000
BEGIN_NS = 1_800_000_000 // 60 * 60 * S_NS
QUIET = TrafficPoint(*[None] * 14)


def point(pressure: float | None) -> ModelPoint:
    return ModelPoint(pressure, None, pressure, 0.0, 1.0, 0.25, 0.0)


def verdict(at_ns: int, code: str = "balanced") -> StoodVerdict:
    return StoodVerdict(at_ns // 1_000_000, code, f"It is {code}.", "")


@given(st.lists(st.one_of(st.none(), st.floats(0, 100, width=32)), min_size=1, max_size=200))
def test_a_coarse_window_is_the_mean_of_the_known_seconds_in_it(values: list[float | None]) -> None:
    rings = Rings(1)
    for second, value in enumerate(values):
        rings.add(BEGIN_NS + S_NS * second, np.array([np.nan if value is None else value], np.float32))
    for tier in TIERS:
        step = tier.window_ns // S_NS
        windows = -(-len(values) // step)
        found = rings.read(tier.window_ns, BEGIN_NS, BEGIN_NS + windows * tier.window_ns)[:, 0]
        for number in range(windows):
            inside = [value for value in values[number * step : (number + 1) * step] if value is not None]
            if inside:
                np.testing.assert_allclose(found[number], sum(inside) / len(inside), rtol=1e-4, atol=1e-4)
            else:
                assert np.isnan(found[number])


def test_data_older_than_a_ring_are_unknown_and_never_those_of_another_time() -> None:
    rings, tier = Rings(1), TIERS[0]
    rings.add(BEGIN_NS, np.array([7.0], np.float32))
    rings.add(BEGIN_NS + tier.windows * tier.window_ns, np.array([9.0], np.float32))
    rings.add(BEGIN_NS, np.array([8.0], np.float32))
    assert np.isnan(rings.read(tier.window_ns, BEGIN_NS, BEGIN_NS + tier.window_ns)).all()


def test_the_verdict_at_the_start_of_a_span_is_returned_with_its_changes() -> None:
    recorder = StatusRecorder()
    for second, code in enumerate(("balanced", "balanced", "prefill_bound", "prefill_bound", "balanced")):
        at_ns = BEGIN_NS + S_NS * second
        recorder.add(at_ns, {"sim": point(float(second))}, QUIET, verdict(at_ns, code))
    found = recorder.history(S_NS, BEGIN_NS + S_NS, BEGIN_NS + 4 * S_NS)
    assert [each.code for each in found.verdicts] == ["balanced", "prefill_bound"]
    assert found.models["sim"]["prefill"] == [1.0, 2.0, 3.0]
    assert found.models["sim"]["decode"] == [None] * 3
    assert found.traffic["requests_per_s"] == [None] * 3


def test_models_beyond_the_bound_are_counted_and_not_stored() -> None:
    recorder = StatusRecorder()
    recorder.add(BEGIN_NS, {f"m{n}": point(1.0) for n in range(MAX_MODELS + 3)}, QUIET, verdict(BEGIN_NS))
    assert recorder.left_out_models == 3
    assert len(recorder.history(S_NS, BEGIN_NS, BEGIN_NS + S_NS).models) == MAX_MODELS
