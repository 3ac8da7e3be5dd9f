"""Properties of which submitted sequences a worker accepts, and of its refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import EngineRequest
from libs.policy.roles import Assignment, Phase, Refusal, Role, serves
from libs.policy.worker.assignment import WorkerReadiness, refusal
from libs.worker.host import admit
from libs.worker.roles import AssignmentState

assignments = st.sampled_from(
    [Assignment("m", role, budget, 1) for role, budget in ((1, 0), (2, 0), (2, 64), (3, 0))]  # type: ignore[arg-type]
)
standings = st.builds(WorkerReadiness, assignments, st.booleans(), st.sampled_from(["a", "b"]), st.booleans())


@given(st.sampled_from(Phase), st.sampled_from([None, "a", "b"]), standings)
def test_a_sequence_is_accepted_exactly_if_role_layout_and_credit_fit(
    phase: Phase, kv_layout: str | None, worker: WorkerReadiness
) -> None:
    reasons = [
        (worker.draining, Refusal.DRAINING),
        (not serves(worker.assignment, phase), Refusal.STALE_ROLE),
        (kv_layout not in (None, worker.kv_layout), Refusal.KV_MISMATCH),
        (not worker.has_credit, Refusal.NO_CAPACITY),
    ]
    assert refusal(phase, kv_layout, worker) is next((code for holds, code in reasons if holds), None)


def submitted(**fields: object) -> pb.Submit:
    kv = pb.KvSource(address="there:1", handle=b"h", kv_layout="other")
    given = {"phase": pb.PHASE_DECODE, "model": "m", "kv": kv, "prompt_tokens": 2, "max_output_tokens": 5}
    return pb.Submit(**{"token_ids": pack_u32([1, 2]), "sampling": pb.Sampling(), **given, **fields})  # type: ignore[arg-type]


WORST = {"phase": 0, "model": "n", "adapter": "a", "prompt_tokens": 0}
"""Each of its faults hides the next."""


@pytest.mark.parametrize(
    ("mended", "draining", "role", "code", "detail"),
    [
        ({}, True, Role.PREFILL, Refusal.INVALID, "phase is missing"),
        ({"phase": 99}, True, Role.PREFILL, Refusal.INVALID, "phase is missing"),
        ({"phase": 2}, True, Role.PREFILL, Refusal.INVALID, "this worker has model 'm'"),
        ({"phase": 2, "model": "m"}, True, Role.PREFILL, Refusal.INVALID,
         "this worker has no adapter 'a': name it in FULCRUM_WORKER_ADAPTERS"),
        ({"phase": 2, "model": "m", "adapter": ""}, True, Role.PREFILL, Refusal.INVALID,
         "prompt_tokens is 0 of 2 tokens"),
        (None, True, Role.PREFILL, Refusal.DRAINING, "the phase does not fit the worker's assignment"),
        (None, False, Role.PREFILL, Refusal.STALE_ROLE, "the phase does not fit the worker's assignment"),
        (None, False, Role.MIXED, Refusal.KV_MISMATCH,
         "the blocks have KV layout 'other', this engine has 'mine'"),
        ({**WORST, "phase": 3, "model": "m", "adapter": "", "prompt_tokens": 2}, False, Role.MIXED,
         Refusal.NO_CAPACITY, "no credit was held"),
    ],
)  # fmt: skip
def test_the_first_of_several_faults_is_reported(
    mended: dict[str, object] | None, draining: bool, role: Role, code: Refusal, detail: str
) -> None:
    state = AssignmentState("m", role, 64 if role is Role.MIXED else 0)
    state.draining = draining
    submit = submitted() if mended is None else submitted(**{**WORST, **mended})
    answer = admit(submit, assignment=state, has_credit=False, sequence_id=1, model_revision="r", kv_layout="mine")
    assert isinstance(answer, pb.Refused)
    assert (answer.code, answer.detail) == (code, detail)


def test_an_acceptable_submit_becomes_the_engines_request() -> None:
    state = AssignmentState("m", Role.MIXED, 0)
    answer = admit(submitted(), assignment=state, has_credit=True, sequence_id=9, model_revision="r", kv_layout="other")
    assert isinstance(answer, EngineRequest)
    assert (answer.sequence_id, answer.kv and answer.kv.address, list(answer.token_ids)) == (9, "there:1", [1, 2])


def test_blocks_are_separated_by_the_tenants_salt_or_else_by_its_name() -> None:
    state = AssignmentState("m", Role.MIXED, 0)

    def root(**context: str) -> bytes:
        submit = submitted(context=pb.RequestContext(**context))  # type: ignore[arg-type]
        answer = admit(submit, assignment=state, has_credit=True, sequence_id=9, model_revision="r", kv_layout="other")
        assert isinstance(answer, EngineRequest)
        return answer.chain_root

    assert root(tenant="a", cache_salt="s") == root(tenant="b", cache_salt="s")
    assert root(tenant="a") == root(cache_salt="a")
    assert len({root(tenant="a"), root(tenant="b"), root(tenant="a", cache_salt="s")}) == 3


@given(st.booleans(), st.booleans(), st.booleans())
def test_an_adapter_is_accepted_if_the_worker_was_started_with_it_or_can_load_it(
    named: bool, loads: bool, brought: bool
) -> None:
    found = admit(
        submitted(adapter="sql", adapter_source="/adapters/sql" if brought else "", phase=Phase.BOTH),
        assignment=AssignmentState("m", 2, 64),
        has_credit=True,
        sequence_id=1,
        model_revision="r",
        kv_layout="other",
        adapters={"sql"} if named else (),
        loads_adapters=loads,
    )
    if named or (loads and brought):
        assert isinstance(found, EngineRequest) and found.adapter == "sql"
    else:
        assert isinstance(found, pb.Refused) and "adapter 'sql'" in found.detail
