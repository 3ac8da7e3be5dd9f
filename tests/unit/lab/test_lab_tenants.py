"""Tests of the live dispatcher in virtual time: a modest tenant's TTFT is the same beside a tenant that sends ten
times its share as beside one that sends its share."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from libs.dispatch.ports import OneForAll
from libs.lab.cluster.books import LabAnswer
from libs.lab.experiment import MAX_SEQUENCES, Experiment, run
from libs.lab.hardware import by_name
from libs.lab.policies import policy_named
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.lab.traces.request import Trace

pytestmark = pytest.mark.usefixtures("quiet_lab")

HARDWARE = "llama3.1-70b-h100-tp4-aic"
WORKERS = 4
SLO = parse_slo("ttft=2s,tpot=50ms")
WARM_UP_S = 20.0
MODEST_CLASS = "modest"
NAMES = ("modest", "flood")
WITHIN = 1.1
SHARE, FLOOD = 0.5, 5.0
"""Fractions of the cluster's capacity that the other tenant requests."""


class KnownTenants(OneForAll):
    """Separated tenants, as at a gateway with keys."""

    are_distinct = True


def trace(rate_rps: float, tenant: str, seed: int, seconds: float) -> Trace:
    made = generate(f"gamma:cv=1,rate={rate_rps},seconds={seconds},isl=1500,osl=150,spread=0.5", seed=seed)
    return replace(made, requests=[replace(each, tenant=tenant) for each in made.requests])


def merged(one: Trace, other: Trace) -> Trace:
    """Merge two traces in the order of arrival."""
    every = sorted([*one.requests, *other.requests], key=lambda each: each.arrival_ns)
    return replace(one, requests=[replace(each, number=place) for place, each in enumerate(every)])


def pair(rates_rps: tuple[float, float], names: tuple[str, str], *, seconds: float) -> Trace:
    """Merge a modest tenant, whose requests are of class "modest", with a flood."""
    modest, flood = (
        trace(rate_rps, name, 1 + place, seconds)
        for place, (rate_rps, name) in enumerate(zip(rates_rps, names, strict=True))
    )
    return merged(
        replace(modest, requests=[replace(each, service_class=MODEST_CLASS) for each in modest.requests]), flood
    )


def ttft_ms(traces: Sequence[Trace], policy: str, max_sequences: int = MAX_SEQUENCES) -> tuple[float, float, float]:
    """Return the modest tenant's TTFT p50 and p99 in ms over all traces, and the share of its requests answered."""
    own: list[LabAnswer] = []
    for requests in traces:
        experiment = Experiment(
            requests, by_name(HARDWARE), WORKERS, SLO, overtime_s=1.0, max_sequences=max_sequences,
            tenants=KnownTenants(),
        )  # fmt: skip
        _, result = run(experiment, policy_named(policy, WORKERS))
        own += [
            each for each in result.answers
            if each.request.service_class == MODEST_CLASS and each.request.arrival_ns > WARM_UP_S * 1e9
        ]  # fmt: skip
    waits = sorted((each.first_ps - each.arrival_ps) / 1e9 for each in own if each.first_ps)
    if not waits:
        return float("nan"), float("nan"), 0.0
    return waits[len(waits) // 2], waits[int(0.99 * len(waits))], len(waits) / len(own)


@pytest.mark.parametrize(
    ("capacity_rps", "places", "seconds"), [(24.0, 256, 50.0), (5.0, 8, 120.0)], ids=["prompts short", "places short"]
)
def test_ttft_at_p99_does_not_depend_on_the_load_of_another_tenant(
    capacity_rps: float, places: int, seconds: float
) -> None:
    modest_rps = 0.2 * capacity_rps
    (_, usual_ms, _), (_, flooded_ms, answered) = (
        ttft_ms([pair((modest_rps, part * capacity_rps), NAMES, seconds=seconds)], "fulcrum:2:2", places)
        for part in (SHARE, FLOOD)
    )
    assert flooded_ms <= WITHIN * usual_ms
    assert answered == 1


def test_ttft_at_p99_depends_on_the_load_if_tenants_are_not_separated() -> None:
    """Otherwise the test above would pass without a real flood."""
    (_, usual_ms, _), (_, flooded_ms, answered) = (
        ttft_ms([pair((1.0, part * 5.0), ("all", "all"), seconds=60.0)], "fulcrum:2:2", 8) for part in (SHARE, FLOOD)
    )
    assert flooded_ms > WITHIN * usual_ms or answered < 1
