"""Tests of a worker's assignment, outbox and settings."""

import socket

import pytest

from libs.contracts.errors import InvalidRequest, StaleRole, StartupError
from libs.contracts.packing import unpack_u32
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    ROLE_MIXED,
    ROLE_PREFILL,
    ROLE_STANDBY,
    ROLE_UNSPECIFIED,
    Assignment,
)
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.reports import Logprob, SequenceOutput
from libs.policy.worker.assignment import role_refusal
from libs.policy.worker.credits import SlotFacts, prefill_slots
from libs.runtime.settings import load_settings
from libs.worker import gateways
from libs.worker.roles import AssignmentState, LastChange
from libs.worker.settings import WorkerSettings
from services.decode.settings import DecodeSettings
from services.prefill.settings import PrefillSettings


def test_a_step_belongs_to_the_epoch_it_began_in() -> None:
    change = LastChange()
    assert change.epoch_at(5, 1) == 1
    for epoch, at_ns in ((2, 100), (3, 200)):
        change.took(Assignment(epoch=epoch), pb.SetRoleRequest(), at_ns)
    assert [change.epoch_at(at_ns, 3) for at_ns in (99, 100, 199, 200, 300)] == [1, 2, 2, 3, 3]


def test_a_role_is_set_once_per_epoch() -> None:
    state = AssignmentState("m", ROLE_PREFILL, 0)
    assert state.current.epoch == 1
    assert state.set_role(expected_epoch=1, role=ROLE_MIXED, budget_tokens=64).epoch == 2
    with pytest.raises(StaleRole, match="expected epoch 1, the worker is at 2"):
        state.set_role(expected_epoch=1, role=ROLE_STANDBY, budget_tokens=0)
    assert (state.current.role, state.current.budget_tokens) == (ROLE_MIXED, 64)


@pytest.mark.parametrize(
    ("role", "budget_tokens", "model"),
    [
        (ROLE_UNSPECIFIED, 0, ""),
        (99, 0, ""),
        (ROLE_PREFILL, 5, ""),
        (ROLE_MIXED, 1_000_001, ""),
        (ROLE_MIXED, 0, "another"),
    ],
)
def test_an_impossible_assignment_changes_nothing(role: int, budget_tokens: int, model: str) -> None:
    state = AssignmentState("m", ROLE_PREFILL, 0)
    with pytest.raises(InvalidRequest):
        state.set_role(expected_epoch=1, role=role, budget_tokens=budget_tokens, model=model)
    assert (state.current.role, state.current.epoch) == (ROLE_PREFILL, 1)


def test_a_draining_worker_accepts_neither_requests_nor_roles() -> None:
    state = AssignmentState("m", ROLE_PREFILL, 0)
    assert role_refusal(state.current, pb.PHASE_PREFILL, draining=state.draining) is None
    state.draining = True
    assert role_refusal(state.current, pb.PHASE_PREFILL, draining=state.draining) == pb.REFUSAL_CODE_DRAINING
    with pytest.raises(StaleRole):
        state.set_role(expected_epoch=1, role=ROLE_MIXED, budget_tokens=0)


def test_a_changed_epoch_refuses_no_request_that_still_fits() -> None:
    state = AssignmentState("m", ROLE_MIXED, 64)
    state.set_role(expected_epoch=1, role=ROLE_MIXED, budget_tokens=0)
    assert role_refusal(state.current, pb.PHASE_DECODE, draining=state.draining) is None
    assert role_refusal(state.current, pb.PHASE_BOTH, draining=state.draining) == pb.REFUSAL_CODE_STALE_ROLE


def test_pending_output_leaves_in_frames_of_bounded_size_with_events_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "MAX_FRAME_TOKENS", 3)
    box = gateways.Outbox()
    for sequence in (1, 2):
        tokens = (sequence * 10, sequence * 10 + 1)
        logprobs = tuple(Logprob(-float(token)) for token in tokens)
        box.add_tokens(SequenceOutput(7 << 32 | sequence, tokens, logprobs))
    box.add_event(pb.SequenceEvent(sequence=2, finished=pb.Finished()))
    first, second = pb.WorkerFrame(), pb.WorkerFrame()
    box.take(first)
    assert box
    box.take(second)
    assert not box
    assert unpack_u32(first.token_sequences) == [1, 1, 2]
    assert unpack_u32(first.token_ids) == [10, 11, 20]
    assert [(entry.index, entry.logprob) for entry in first.logprobs] == [(0, -10.0), (1, -11.0), (2, -20.0)]
    assert not first.events
    assert unpack_u32(second.token_ids) == [21]
    assert [(entry.index, entry.logprob) for entry in second.logprobs] == [(0, -21.0)]
    assert second.events[0].sequence == 2


def test_services_differ_only_in_their_first_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_WORKER_ENGINE", "sim")
    prefill, decode = load_settings(PrefillSettings), load_settings(DecodeSettings)
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert prefill.id.startswith("prefill-") and decode.id.startswith("decode-")
    monkeypatch.setenv("FULCRUM_WORKER_ROLE", "mixed")
    monkeypatch.setenv("FULCRUM_WORKER_BUDGET_TOKENS", "128")
    assert load_settings(PrefillSettings).role == "mixed"


@pytest.mark.parametrize("variable", ["FULCRUM_WORKER_PREFILL_ROLE", "FULCRUM_WORKER_TOKEN_ROLE"])
def test_no_setting_names_code_to_load(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("FULCRUM_WORKER_ENGINE", "sim")
    monkeypatch.setenv(variable, "nowhere.at_all:Nobody")
    assert "nowhere.at_all:Nobody" not in load_settings(PrefillSettings).model_dump().values()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FULCRUM_WORKER_ROLE", "mixed", "FULCRUM_WORKER_BUDGET_TOKENS"),
        ("FULCRUM_WORKER_ENGINE", "torch", "FULCRUM_WORKER_MODEL_PATH"),
        ("FULCRUM_WORKER_PORT", "70000", "FULCRUM_WORKER_PORT"),
        ("FULCRUM_WORKER_SIM_SPEEDUP", "0", "FULCRUM_WORKER_SIM_SPEEDUP"),
    ],
)
def test_an_impossible_setting_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str) -> None:
    monkeypatch.setenv("FULCRUM_WORKER_ENGINE", "sim")
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartupError, match=said):
        load_settings(WorkerSettings)


@pytest.mark.parametrize(
    ("host", "advertise", "address"),
    [
        ("127.0.0.1", "", "127.0.0.1:5000"),
        ("::1", "", "[::1]:5000"),
        ("0.0.0.0", "", f"{socket.gethostname()}:5000"),
        ("0.0.0.0", "worker.example", "worker.example:5000"),
        ("0.0.0.0", "worker.example:7", "worker.example:7"),
        ("0.0.0.0", "[fe80::1]", "[fe80::1]:5000"),
        ("0.0.0.0", "[fe80::1]:7", "[fe80::1]:7"),
    ],
)
def test_the_advertised_address_is_reachable_from_other_hosts(host: str, advertise: str, address: str) -> None:
    values = {"engine": "sim", "host": host, "advertise": advertise, "node": "node-a"}
    assert WorkerSettings.model_validate(values).advertised_address(5000) == address


@pytest.mark.parametrize(
    ("mean_tokens", "prompts"), [(5000.0, 4), (400.0, 4), (256.0, 8), (128.0, 16), (60.0, 32), (1.0, 64)]
)
def test_a_prefill_worker_accepts_more_prompts_if_they_are_short(mean_tokens: float, prompts: int) -> None:
    assert prefill_slots(SlotFacts(256, mean_tokens, 512, 0.1)) == prompts
    assert prefill_slots(SlotFacts(2, mean_tokens, 512, 0.1)) == 2
