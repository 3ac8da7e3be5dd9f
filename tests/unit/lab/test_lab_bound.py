"""Tests of the fluid bound: no policy exceeds it for long, by requests or by work."""

from dataclasses import replace

import pytest

from libs.lab.experiment import Experiment, run
from libs.lab.hardware import resolve
from libs.lab.policies import policy_named
from libs.lab.search import WANTED, _sequence_ns, fluid_rate, passes
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.perfmodel.profiles import profile
from libs.policy.step_time import MATRIX_ROWS, StepTimeModel

pytestmark = pytest.mark.usefixtures("quiet_lab")

SLO = parse_slo("ttft=max(1s,3x),tpot=30ms")
HARDWARE = resolve("llama-3.1-8b", "h100")
ALIKE = Experiment(generate("poisson:rate=4,seconds=60,isl=2000,osl=100,spread=0", seed=3), HARDWARE, 2, SLO)
MIXED = Experiment(generate("flipflop:rate=10,seconds=40,isl=3000,osl=200", seed=3), HARDWARE, 2, SLO)


def test_equal_requests_count_as_much_as_their_work() -> None:
    rates = [fluid_rate(ALIKE, measure) for measure in ("both", "requests", "work")]
    assert rates == pytest.approx([rates[0]] * 3, rel=1e-6)


def test_among_unequal_requests_the_cheap_ones_are_served_first() -> None:
    requests, work = fluid_rate(MIXED, "requests"), fluid_rate(MIXED, "work")
    assert fluid_rate(MIXED) == min(requests, work)
    assert requests > work / WANTED  # a tenth of them holds more than a tenth of the work


def test_twice_the_workers_serve_twice_as_much() -> None:
    assert fluid_rate(replace(MIXED, workers=4)) == pytest.approx(2 * fluid_rate(MIXED))


@pytest.mark.parametrize("policy", ["aggregated", "fulcrum:1:1"])
def test_no_policy_exceeds_the_bound(policy: str) -> None:
    """Half a minute of short answers: what still decodes at the end is little beside them."""
    experiment = Experiment(generate("poisson:rate=60,seconds=30,isl=2000,osl=10", seed=5), HARDWARE, 2, SLO)
    assert fluid_rate(experiment) < 1.0
    report, _ = run(experiment, policy_named(policy, 2))
    assert passes([report], "requests") < WANTED
    assert passes([report], "work") < WANTED


H200 = profile("llama3.1-8b-h200-aic").step_time


@pytest.mark.parametrize("most", [1, 3, 100, 144, 145, 512, 513, 540, 900])
@pytest.mark.parametrize("wide_ns", [0.0, 15_973.0, 60_000.0])
def test_a_sequence_costs_as_little_as_in_the_best_batch(most: int, wide_ns: float) -> None:
    model = replace(H200, decode_wide_ns=wide_ns)

    def beside_prompts_ns(batch: int) -> float:
        rows = max(batch, MATRIX_ROWS)
        hidden_ns = (1 - model.interference) * model.hiding_ns(rows)
        return (model.reading_ns(rows) + model.sequences_ns(batch) - hidden_ns) / batch

    assert _sequence_ns(model, most) == pytest.approx(min(map(beside_prompts_ns, range(1, most + 1))))


@pytest.mark.parametrize("most", [1, 7, 300])
def test_without_large_batches_a_sequence_costs_the_same_and_its_part_of_reading(most: int) -> None:
    model: StepTimeModel = HARDWARE.profile.step_time
    expected_ns = model.interference * model.reading_ns(MATRIX_ROWS) / most + model.decode_sequence_ns
    assert _sequence_ns(model, most) == pytest.approx(expected_ns)


def test_large_batches_lower_the_bound() -> None:
    hardware = replace(HARDWARE, profile=replace(HARDWARE.profile, step_time=H200))
    plain = replace(H200, saturating_sequences=0, graph_sequences=0)
    cheaper = replace(hardware, profile=replace(HARDWARE.profile, step_time=plain))
    bounds = [fluid_rate(replace(MIXED, hardware=each)) for each in (hardware, cheaper)]
    assert bounds[0] < bounds[1]
