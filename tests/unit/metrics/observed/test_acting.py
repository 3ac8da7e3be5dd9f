"""Tests over fake servers in virtual time of the loop that moves observed servers between roles."""

from collections.abc import Mapping

import pytest
from google.protobuf.message import Message

from libs.contracts.errors import StartupError
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Decision
from libs.contracts.topics import Topic
from libs.observe.roles import FleetWorker
from libs.policy.planner.limits import ModelLimits
from libs.testing.memory.fleet_roles import MemoryFleetRoles, MemoryLeases
from services.metrics.cluster_events import Event
from services.metrics.observed.acting import RoleActor
from services.metrics.status.report import ClusterStatus
from tests.observe_rig import Load
from tests.unit.metrics.observed.observed_rig import BUSY, SECOND_NS, Observed, suite

REST_S = 5
FLOOD = Load(prompts_per_s=25, prompt_tokens=1_500, waiting=40, waiting_per_s=12)
ROLES = {"p0": "prefill", "d0": "decode", "d1": "decode", "d2": "decode"}


class Acting:
    """A fleet whose servers follow the roles of its control plane, as a pod's label does."""

    def __init__(self, observed: Observed, limits: ModelLimits, fixed: Mapping[str, str]) -> None:
        self.observed = observed
        self.roles, self.leases = MemoryFleetRoles(), MemoryLeases()
        for target in observed.fleet.status().servers:
            self.roles.put(FleetWorker(target.name, target.role, fixed_because=fixed.get(target.name, "")))
        self.audits: list[AuditEvent] = []
        self.reasons: list[str] = []
        self.follows = True
        """False: the fleet's router ignores the roles."""
        self.actor = RoleActor(
            self.roles, lambda: observed.verdicts.seen, self._publish, observed, lease=self.leases.of("this"),
            limits=limits, rest_ns=REST_S * SECOND_NS,
        )  # fmt: skip

    def _publish(self, topic: Topic, value: Message) -> None:
        if isinstance(value, AuditEvent):
            self.audits.append(value)
        else:
            assert isinstance(value, Decision)
            self.reasons.append(value.reason)
            self.observed.bus.publish(topic, value)

    async def run(self, seconds: int) -> ClusterStatus:
        """Step once a second."""
        for _ in range(seconds):
            status = await self.observed.run(1)
            await self.actor.step()
            if self.follows and not self.roles.away:
                for each in await self.roles.workers():
                    self.observed.set_role(each.name, each.role)
        return await self.observed.run(0.5) if seconds else status

    @property
    def moves(self) -> list[tuple[str, str]]:
        return [(name, role) for name, role, _ in self.roles.moves]

    def events(self, action: str) -> list[Event]:
        return [each for each in self.observed.state.events.after(0) if each.action == action]


async def flooded(limits: ModelLimits | None = None, fixed: Mapping[str, str] | None = None) -> Acting:
    """A fleet known well, whose one prefill server has just met a flood of prompts."""
    acting = Acting(suite(dict.fromkeys(ROLES, BUSY), ROLES), limits or ModelLimits(), fixed or {})
    await acting.actor.begin()
    await acting.run(10)
    assert acting.moves == []
    acting.observed.fakes["p0"].set(FLOOD)
    return acting


async def test_a_flood_of_prompts_moves_one_decode_server_and_predicts_the_effect() -> None:
    acting = await flooded()
    status = await acting.run(5)
    (move,) = acting.moves
    assert move[1] == "prefill" and ROLES[move[0]] == "decode"
    assert status.planner.acts
    assert status.planner.last_move is not None
    assert (status.planner.last_move.worker, status.planner.last_move.to_role) == move
    (decided,) = acting.events("set_role")
    assert decided.worker == move[0]
    assert "prefill pressure" in decided.reason
    assert "moving a decode server to prefill leaves a pressure of" in decided.reason
    (moved,) = acting.events("role_moved")
    assert moved.actor == "observe"
    (audit,) = acting.audits
    assert (audit.actor, audit.status, audit.action) == ("observe", 200, f"role {move[0]} prefill")
    assert all(cause.action is None for cause in status.verdict.causes)


async def test_the_next_move_waits_for_the_pause_and_each_effect_is_measured() -> None:
    acting = await flooded()
    await acting.run(8)
    assert len(acting.moves) == 1
    await acting.run(REST_S + 12)
    assert len(acting.moves) == 2
    (effect, *_) = acting.events("effect")
    assert effect.worker == acting.moves[0][0]


async def test_no_move_leaves_fewer_decode_servers_than_the_minimum() -> None:
    acting = await flooded(ModelLimits(decode_min=2))
    await acting.run(25)
    assert [role for _, role in acting.moves] == ["prefill"]
    acting = await flooded(ModelLimits(decode_min=3))
    await acting.run(8)
    assert acting.moves == []


async def test_a_server_that_became_unready_does_not_count_for_the_minimum() -> None:
    acting = await flooded(ModelLimits(decode_min=2))
    acting.roles.put(FleetWorker("d2", "decode", ready=False))
    await acting.run(8)
    assert acting.moves == []
    assert any("fewer than the minimum of 1 and 2" in each for each in acting.reasons)


async def test_fixed_servers_never_move_and_status_names_them() -> None:
    acting = await flooded(fixed=dict.fromkeys(("d0", "d1", "d2"), "its owner selects by the label"))
    status = await acting.run(8)
    assert acting.moves == []
    assert "d0: its owner selects by the label" in status.planner.reason


async def test_after_a_refusal_the_loop_pauses_gives_the_reason_and_advises_again() -> None:
    acting = await flooded()
    acting.roles.refuses = "the API server forbids it"
    status = await acting.run(8)
    assert acting.moves == []
    assert not status.planner.acts
    assert "the API server forbids it" in status.planner.idle_because
    assert status.verdict.action is not None and status.verdict.action.instruction
    assert {each.status for each in acting.audits} == {409}
    (event,) = acting.events("set_mode")
    assert "has paused role moves" in event.reason and "forbids" in event.reason
    acting.roles.refuses = ""
    status = await acting.run(12)
    assert acting.moves
    assert status.planner.acts


async def test_the_loop_pauses_while_the_control_plane_is_away_and_resumes_afterwards() -> None:
    acting = await flooded()
    acting.roles.away = "it does not answer"
    status = await acting.run(10)
    assert acting.moves == []
    assert status.planner.idle_because == "it does not answer"
    acting.roles.away = ""
    status = await acting.run(12)
    assert acting.moves and status.planner.acts


async def test_the_loop_advises_while_another_process_has_the_lease_and_then_takes_over() -> None:
    acting = await flooded()
    acting.leases.holder = "observe-other"
    status = await acting.run(8)
    assert acting.moves == []
    assert not status.planner.acts
    assert status.planner.idle_because == "observe-other acts on this fleet, and this process advises"
    assert status.verdict.action is not None and status.verdict.action.instruction
    assert [each.reason for each in acting.events("set_mode")] == [status.planner.idle_because]
    acting.leases.holder = ""
    await acting.run(REST_S - 1)
    assert acting.moves == [], "the other one may just have made a move"
    status = await acting.run(10)
    assert acting.moves and status.planner.acts


async def test_after_an_outage_the_loop_names_the_other_process_again_and_pauses_once_it_takes_over() -> None:
    acting = await flooded()
    acting.leases.holder = "observe-other"
    status = await acting.run(8)
    named = status.planner.idle_because
    for away in (acting.roles, acting.leases):
        away.away = "it does not answer"
        status = await acting.run(10)
        assert status.planner.idle_because == "it does not answer"
        away.away = ""
        status = await acting.run(15)
        assert status.planner.idle_because == named
    acting.leases.holder = ""
    await acting.run(REST_S - 1)
    assert acting.moves == [], "the other one may just have made a move"


async def test_the_loop_starts_beside_another_active_process_and_refuses_if_none_can_be_identified() -> None:
    observed = suite(dict.fromkeys(ROLES, BUSY), ROLES)
    acting = Acting(observed, ModelLimits(), {})
    acting.leases.holder = "observe-other"
    await acting.actor.begin()
    assert acting.actor.still_because.startswith("observe-other acts")
    acting.leases.away = "leases is forbidden"
    with pytest.raises(StartupError, match="--act: leases is forbidden"):
        await acting.actor.begin()


async def test_an_unreadable_lease_pauses_moves() -> None:
    acting = await flooded()
    acting.leases.away = "the API server does not answer"
    status = await acting.run(8)
    assert acting.moves == []
    assert status.planner.idle_because == "the API server does not answer"
    acting.leases.away = ""
    await acting.run(15)
    assert acting.moves


async def test_a_role_changed_by_another_actor_is_not_reversed_at_once() -> None:
    acting = await flooded()
    acting.follows = False
    for name in ("d0", "d1", "d2"):
        acting.roles.put(FleetWorker(name, "prefill" if name == "d2" else "decode"))
    await acting.run(10)
    assert ("d2", "prefill") not in acting.moves


async def test_a_move_that_telemetry_does_not_confirm_stops_further_moves() -> None:
    acting = await flooded()
    acting.follows = False
    status = await acting.run(35)
    assert len(acting.moves) == 1
    assert "its telemetry does not show it" in status.planner.idle_because


@pytest.mark.parametrize("roles", [{"p0": "prefill", "d0": "decode"}, dict.fromkeys(("a", "b"), "mixed")])
async def test_the_last_server_of_a_phase_and_servers_of_both_phases_do_not_move(roles: Mapping[str, str]) -> None:
    acting = Acting(suite(dict.fromkeys(roles, BUSY), roles), ModelLimits(), {})
    await acting.actor.begin()
    await acting.run(15)
    acting.observed.fakes[next(iter(roles))].set(FLOOD)
    await acting.run(10)
    assert acting.moves == []
