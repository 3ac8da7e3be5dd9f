"""Tests of workers with incompatible KV: found from the registry's list, and reported with the difference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Capabilities, Worker
from libs.contracts.protocol import unpaired
from libs.contracts.roles import ROLE_NAMES, role_from_name

NIXL = "vllm/0.32.0/NixlConnector/float32/30x3x64/tp1/block32"


def worker(worker_id: str, role: str, layout: str = NIXL, *, model: str = "m", revision: str = "r" * 40) -> Worker:
    wire_role, budget_tokens = role_from_name(role, 64 if role == "mixed" else 0)
    return Worker(
        id=worker_id,
        assignment=Assignment(model=model, role=wire_role, budget_tokens=budget_tokens),
        capabilities=Capabilities(kv_layout=layout),
        model_revision=revision,
    )


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (worker("late", "decode", NIXL.replace("block32", "block64")), "p differs in block64 here, block32 there"),
        (worker("late", "decode", NIXL.replace("0.32", "0.33")), "p differs in 0.33.0 here, 0.32.0 there"),
        (worker("late", "decode", NIXL + "/more"), "more here, nothing there"),
        (worker("late", "decode", revision="s" * 40), "weights ssssssssssss here, rrrrrrrrrrrr there"),
        (worker("late", "prefill", NIXL.replace("tp1", "tp2")), "d differs in tp2 here, tp1 there"),
    ],
)
def test_a_worker_of_another_kind_is_reported_with_the_difference(other: Worker, says: str) -> None:
    found = unpaired([worker("p", "prefill"), worker("d", "decode"), other])
    assert list(found) == ["late"]
    assert "gets no work" in str(found["late"]) and says in str(found["late"])


def test_two_complete_kinds_serve_side_by_side() -> None:
    new = NIXL.replace("0.32", "0.33")
    whole = [worker("p", "prefill"), worker("d", "decode"), worker("q", "prefill", new), worker("e", "decode", new)]
    assert unpaired(whole) == {}
    assert list(unpaired(whole[:3])) == ["q"]


def test_the_most_similar_of_several_workers_is_named() -> None:
    far, near = worker("a", "prefill", "torch/16"), worker("z", "prefill", NIXL.replace("float32", "bfloat16"))
    assert unpaired([far, near, worker("d", "decode")])["d"].like == "z"


@given(st.lists(st.tuples(st.sampled_from(ROLE_NAMES), st.sampled_from("AB"), st.sampled_from("mn")), max_size=8))
def test_a_reported_worker_has_only_incompatible_partners(kinds: list[tuple[str, str, str]]) -> None:
    workers = [worker(str(number), role, kind, model=model) for number, (role, kind, model) in enumerate(kinds)]
    found = unpaired(workers)
    for number, (role, kind, model) in enumerate(kinds):
        partners = {"prefill": {"decode", "mixed"}, "decode": {"prefill"}}.get(role, set())
        in_reach = [each for each in kinds if each[0] in partners and each[2] == model]
        assert (str(number) in found) is (bool(in_reach) and all(each[1] != kind for each in in_reach))


def test_workers_of_a_single_phase_are_not_reported() -> None:
    assert unpaired([worker("d", "decode"), worker("e", "decode", "other")]) == {}
