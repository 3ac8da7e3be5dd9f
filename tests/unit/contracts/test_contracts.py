"""Tests of contracts: packing, hash chains, roles, topics and errors."""

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts import errors, topics
from libs.contracts.hashing import HASH_BYTES, block_hashes, chain_root
from libs.contracts.packing import pack_f32, pack_u32, unpack_f32, unpack_u32
from libs.contracts.pb.fulcrum.common.v1 import common_pb2
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, ROLE_STANDBY, Assignment
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import PHASE_BOTH, PHASE_DECODE, PHASE_PREFILL, Phase
from libs.contracts.roles import ROLE_NAMES, role_from_name, role_name
from libs.policy.roles import Phase as PolicyPhase
from libs.policy.roles import Refusal, Role, serves

U32 = st.integers(0, 2**32 - 1)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=80)


@given(st.lists(U32))
def test_packed_integers_round_trip(values: list[int]) -> None:
    assert unpack_u32(pack_u32(values)) == values


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_packed_floats_round_trip(values: list[float]) -> None:
    assert unpack_f32(pack_f32(values)) == values


def test_a_truncated_packing_is_an_error() -> None:
    with pytest.raises(ValueError, match="buffer size"):
        unpack_u32(b"\x01\x02\x03")


@given(TOKENS, TOKENS, st.integers(1, 16))
def test_equal_prefixes_have_equal_hashes_and_others_differ(a: list[int], b: list[int], size: int) -> None:
    root = chain_root(model_revision="r", kv_layout="l")
    hashes_a, hashes_b = block_hashes(root, a, size), block_hashes(root, b, size)
    assert len(hashes_a) == len(a) // size
    for i, (one, other) in enumerate(zip(hashes_a, hashes_b, strict=False)):
        assert len(one) == HASH_BYTES
        assert (one == other) == (a[: (i + 1) * size] == b[: (i + 1) * size])


def test_lists_and_arrays_have_equal_hashes() -> None:
    root = chain_root(model_revision="r", kv_layout="l")
    tokens = list(range(40))
    assert block_hashes(root, tokens, 16) == block_hashes(root, np.array(tokens, np.int32), 16)


@pytest.mark.parametrize("changed", ["model_revision", "kv_layout", "adapter", "tenant_salt"])
def test_everything_that_changes_kv_changes_the_root(changed: str) -> None:
    base = {"model_revision": "m", "kv_layout": "l", "adapter": "a", "tenant_salt": "t"}
    assert chain_root(**base) != chain_root(**{**base, changed: "other"})


def test_adjacent_parts_of_a_root_are_not_confused() -> None:
    assert chain_root(model_revision="ab", kv_layout="c") != chain_root(model_revision="a", kv_layout="bc")


@pytest.mark.parametrize("name", ROLE_NAMES)
def test_role_names_round_trip(name: str) -> None:
    role, budget_tokens = role_from_name(name, budget_tokens=64)
    assert role_name(Assignment(role=role, budget_tokens=budget_tokens)) == name


@pytest.mark.parametrize(("name", "budget", "says"), [("boss", 0, "prefill, decode"), ("mixed", 0, "budget of 1 to")])
def test_an_invalid_role_lists_the_allowed_ones(name: str, budget: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        role_from_name(name, budget)


@pytest.mark.parametrize(
    ("assignment", "phases"),
    [
        (Assignment(role=ROLE_PREFILL), {PHASE_PREFILL}),
        (Assignment(role=ROLE_MIXED), {PHASE_DECODE}),
        (Assignment(role=ROLE_MIXED, budget_tokens=64), {PHASE_DECODE, PHASE_BOTH}),
        (Assignment(role=ROLE_STANDBY), set()),
    ],
)
def test_an_assignment_serves_only_its_phases(assignment: Assignment, phases: set[Phase]) -> None:
    assert {phase for phase in Phase.values() if serves(assignment, phase)} == phases


def test_topics_include_the_cluster_and_key_on_a_field_of_their_value() -> None:
    names = [topic.name("blue") for topic in topics.ALL]
    assert len(set(names)) == len(names)
    for topic in topics.ALL:
        assert topic.name("blue").startswith("fulcrum.blue.")
        assert topic.key in topic.value.DESCRIPTOR.fields_by_name


def _error_classes(base: type[errors.FulcrumError]) -> list[type[errors.FulcrumError]]:
    return [base, *(found for child in base.__subclasses__() for found in _error_classes(child))]


def test_each_error_has_its_own_code_and_fitting_statuses() -> None:
    # Narrower errors of services reach clients as the error that they narrow.
    trees = (errors.__name__,)
    classes = [error for error in _error_classes(errors.FulcrumError) if error.__module__ in trees]
    assert len({error.code for error in classes}) == len(classes)
    for error in classes:
        assert 400 <= error.http_status < 600
        assert grpc.StatusCode[error.grpc_status] is not grpc.StatusCode.OK
        client_fault = error.error_type in {"invalid_request_error", "authentication_error", "rate_limit_error"}
        # HTTP has 501 and 505 for requests that ask for what no server here does.
        not_served = error.http_status in (501, 505)
        assert client_fault == (error.http_status < 500) or not_served or issubclass(error, errors.StaleRole)


def test_decisions_and_messages_use_the_same_numbers_of_roles_phases_and_refusals() -> None:
    for ours, wire, prefix in (
        (Role, common_pb2.Role, "ROLE_"),
        (PolicyPhase, worker_pb2.Phase, "PHASE_"),
        (Refusal, worker_pb2.RefusalCode, "REFUSAL_CODE_"),
    ):
        known = {name.removeprefix(prefix): number for name, number in wire.items() if number}
        assert {each.name: each.value for each in ours} == known
