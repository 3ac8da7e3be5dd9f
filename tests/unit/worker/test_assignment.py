"""Tests of whether a worker accepts another assignment, and of its refusals."""

import pytest

from libs.contracts.errors import FulcrumError, InvalidRequest, StaleLead, StaleRole
from libs.policy.roles import Assignment, Phase, Refusal, Role
from libs.policy.worker.assignment import (
    AssignmentRefusal,
    LatestLead,
    WantedAssignment,
    first_assignment,
    leaves_decode,
    next_assignment,
    role_refusal,
)
from libs.worker.roles import AssignmentState, refuse_stale_lead

CURRENT = Assignment("m", Role.MIXED, 64, 7)


def test_an_accepted_assignment_has_the_same_model_and_the_next_epoch() -> None:
    taken = next_assignment(
        CURRENT, WantedAssignment(role=1, budget_tokens=0, expected_epoch=7, model="m"), draining=False
    )
    assert taken == Assignment("m", Role.PREFILL, 0, 8)
    assert first_assignment("m", 3, 0) == Assignment("m", Role.STANDBY, 0, 1)


@pytest.mark.parametrize(
    ("wanted", "draining", "reason", "said"),
    [
        (WantedAssignment(99, 5, 1, "n"), True, AssignmentRefusal.DRAINING,
         StaleRole("the worker is draining: it takes no other role, choose another worker")),
        (WantedAssignment(99, 5, 1, "n"), False, AssignmentRefusal.STALE_EPOCH,
         StaleRole("expected epoch 1, the worker is at 7: check its state, then try again")),
        (WantedAssignment(99, 5, 7, "{n}"), False, AssignmentRefusal.OTHER_MODEL,
         InvalidRequest("this worker holds model 'm', not '{n}'")),
        (WantedAssignment(99, 5, 7, "m"), False, AssignmentRefusal.UNKNOWN_ROLE,
         InvalidRequest("role must be prefill, mixed or standby", param="role")),
        (WantedAssignment(1, 5, 7), False, AssignmentRefusal.BUDGET_WITHOUT_MIXED,
         InvalidRequest("only role mixed has a prompt budget", param="budget_tokens")),
        (WantedAssignment(2, 1_000_001, 7), False, AssignmentRefusal.BUDGET_TOO_LARGE,
         InvalidRequest("a prompt budget is at most 1000000 tokens", param="budget_tokens")),
    ],
)  # fmt: skip
def test_a_refused_assignment_has_one_reason_and_one_sentence(
    wanted: WantedAssignment, draining: bool, reason: AssignmentRefusal, said: FulcrumError
) -> None:
    assert next_assignment(CURRENT, wanted, draining=draining) is reason
    state = AssignmentState("m", Role.MIXED, 64)
    for _ in range(6):
        state.set_role(expected_epoch=state.current.epoch, role=Role.MIXED, budget_tokens=64)
    state.draining = draining
    with pytest.raises(FulcrumError) as raised:
        state.set_role(
            expected_epoch=wanted.expected_epoch,
            role=wanted.role,
            budget_tokens=wanted.budget_tokens,
            model=wanted.model,
        )
    assert (type(raised.value), raised.value.message, raised.value.param) == (type(said), said.message, said.param)
    assert state.current == CURRENT


def test_a_worker_does_not_start_with_an_impossible_assignment() -> None:
    assert first_assignment("m", 1, 5) is AssignmentRefusal.BUDGET_WITHOUT_MIXED
    with pytest.raises(InvalidRequest, match="only role mixed"):
        AssignmentState("m", 1, 5)


@pytest.mark.parametrize("phase", Phase)
def test_requests_are_refused_by_phase_and_all_of_them_while_draining(phase: Phase) -> None:
    fitting = {Phase.PREFILL: Role.PREFILL, Phase.DECODE: Role.MIXED, Phase.BOTH: Role.MIXED}[phase]
    for role in Role:
        assignment = Assignment("m", role, 64 if role is Role.MIXED else 0, 1)
        assert role_refusal(assignment, phase, draining=False) is (None if role is fitting else Refusal.STALE_ROLE)
        assert role_refusal(assignment, phase, draining=True) is Refusal.DRAINING


def test_every_change_out_of_role_mixed_gives_up_decoding() -> None:
    assert not leaves_decode(CURRENT, draining=False)
    assert leaves_decode(CURRENT, draining=True)
    assert all(leaves_decode(Assignment("m", role, 0, 1), draining=False) for role in (Role.PREFILL, Role.STANDBY))


def test_an_order_of_an_expired_lead_is_refused_and_a_persons_never_is() -> None:
    latest = LatestLead()
    for term in (0, 7, 9, 9, 0):
        refuse_stale_lead(latest, term)
    with pytest.raises(StaleLead, match=r"a later lead \(9, yours is 8\).*restart the worker"):
        refuse_stale_lead(latest, 8)
