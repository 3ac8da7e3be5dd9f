"""Tests in virtual time of many models on few GPUs: who is served, and that switching loses nothing."""

from collections.abc import Sequence

from libs.testing.models.cluster import (
    NEVER_S,
    KeepingRule,
    LoadCost,
    ModelsLab,
    ServedRequest,
    cut,
    good_share,
    models_of,
    requests_of,
)
from libs.testing.models.rules import BetweenRequests, OneEach, PlannerRule

LINK = LoadCost(25e9, 0.7)
WHOLE, PARTS = (72e9,), (20e9, 20e9, 32e9)


def served(
    rule: KeepingRule, *, models: int, gpus: int = 2, rate: float = 0.1, parts: Sequence[float] = WHOLE,
    drain_s: float = NEVER_S,
) -> tuple[list[ServedRequest], ModelsLab]:  # fmt: skip
    known = models_of(models)
    requests = requests_of(known, rate, 60.0, 7)
    lab = ModelsLab(known, requests, cut(gpus, parts), LINK, rule, drain_s=drain_s)
    lab.run()
    return requests, lab


def test_with_one_model_per_gpu_only_as_many_models_as_gpus_are_served() -> None:
    requests, _ = served(OneEach(), models=4)
    for name, good in (("model-000", True), ("model-001", True), ("model-002", False), ("model-003", False)):
        mine = [each for each in requests if each.model == name]
        assert mine and all(bool(each.end_s) == good for each in mine)


def test_switching_between_requests_serves_more_models_than_gpus() -> None:
    requests, lab = served(BetweenRequests(), models=6, rate=0.05)
    assert good_share(requests, 0.0) == 1.0
    assert lab.switches >= 6


def test_a_request_handed_back_is_answered_completely_and_its_first_token_stands() -> None:
    requests, lab = served(PlannerRule(turn_s=2.0), models=16, parts=PARTS, drain_s=0.0)
    assert lab.cuts > 0
    assert all(each.t_s < each.first_s < each.end_s for each in requests)
    models = lab.models
    for each in requests:
        # No answer is computed faster than its device computes alone.
        least_s = (each.output_tokens - 1) * models[each.model].step_time.decode_fixed_ns / 1e9
        assert each.end_s - each.first_s >= least_s * 0.99
    assert not lab.in_flight()


def test_handing_requests_back_serves_more_than_finishing_answers() -> None:
    ends, _ = served(PlannerRule(turn_s=2.0), models=16, parts=PARTS)
    back, _ = served(PlannerRule(turn_s=2.0), models=16, parts=PARTS, drain_s=0.0)
    assert good_share(back, 0.0) > good_share(ends, 0.0)


def test_the_same_log_gives_the_same_answers() -> None:
    first, _ = served(PlannerRule(turn_s=2.0), models=10, parts=PARTS, drain_s=0.0)
    again, _ = served(PlannerRule(turn_s=2.0), models=10, parts=PARTS, drain_s=0.0)
    assert first == again


def test_a_model_is_loaded_only_where_its_weights_fit() -> None:
    _, lab = served(PlannerRule(turn_s=2.0), models=12, parts=PARTS, drain_s=0.0)
    assert all(each.model is None or each.model.weights_bytes <= each.memory_bytes for each in lab.places)
