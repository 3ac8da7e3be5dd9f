"""A modest tenant's first tokens come as soon beside a tenant that asks for ten times its share as beside one that asks
for its share: the live dispatcher in virtual time, so that nothing depends on the machine."""

import pytest

from load.gateway.bench_fairness import pair, ttft_ms

pytestmark = pytest.mark.usefixtures("quiet_lab")

NAMES = ("modest", "flood")
WITHIN = 1.1
SHARE, FLOOD = 0.5, 5.0
"""Of what the cluster serves, that the other tenant asks for."""


@pytest.mark.parametrize(
    ("capacity_rps", "places", "seconds"), [(24.0, 256, 50.0), (5.0, 8, 120.0)], ids=["prompts short", "places short"]
)
def test_ttft_at_p99_does_not_follow_what_another_tenant_asks_for(
    capacity_rps: float, places: int, seconds: float
) -> None:
    modest_rps = 0.2 * capacity_rps
    (_, usual_ms, _), (_, flooded_ms, answered) = (
        ttft_ms([pair((modest_rps, part * capacity_rps), NAMES, seconds=seconds)], "fulcrum:2:2", places)
        for part in (SHARE, FLOOD)
    )
    assert flooded_ms <= WITHIN * usual_ms
    assert answered == 1


def test_where_tenants_are_one_it_does() -> None:
    """Otherwise the flood would be none."""
    (_, usual_ms, _), (_, flooded_ms, answered) = (
        ttft_ms([pair((1.0, part * 5.0), ("all", "all"), seconds=60.0)], "fulcrum:2:2", 8) for part in (SHARE, FLOOD)
    )
    assert flooded_ms > WITHIN * usual_ms or answered < 1
