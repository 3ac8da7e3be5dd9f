"""Test of how often a worker sends keepalives, by what gateways have running on it."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.protocol import RESTING_SIGN_OF_LIFE_MS, SIGN_OF_LIFE_MS
from libs.engine.reports import EngineIntegrity
from libs.worker.gateways import AttachedGateways

REPORTED_S = 50.0


@dataclass
class Engine:
    """The parts of an engine that keepalives read."""

    leased_handles: int = 0

    def integrity(self) -> EngineIntegrity:
        """Report that many handles whose blocks wait."""
        return EngineIntegrity(0, 0, self.leased_handles)


@pytest.mark.parametrize(
    ("leased_handles", "living", "within_ms"),
    [(0, False, RESTING_SIGN_OF_LIFE_MS), (0, True, SIGN_OF_LIFE_MS), (1, False, SIGN_OF_LIFE_MS)],
    ids=["at rest", "with a sequence", "with blocks that wait to be pulled"],
)
def test_a_gateway_with_work_on_a_worker_receives_a_frame_within_a_beat(
    leased_handles: int, living: bool, within_ms: int
) -> None:
    gateways = AttachedGateways(cast(Any, Engine(leased_handles)), cast(Any, None), "c", common.Worker)
    link = gateways.attach(pb.Hello(cluster="c", gateway_id="g0"))
    link.load_news, link.sent_s = False, REPORTED_S
    if living:
        link.living.add(1)
    assert gateways.beat(REPORTED_S) == pytest.approx(REPORTED_S + within_ms / 1e3)
    gateways.beat(REPORTED_S + within_ms / 1e3)
    assert link.load_news
