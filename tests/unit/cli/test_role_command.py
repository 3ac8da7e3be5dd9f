"""Tests of the moves that `fulcrum role` refuses before it calls a worker."""

from typing import Any

import pytest

from libs.cli.suite import role as change
from libs.contracts.errors import Conflict, StartupError
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, Assignment

PREFILL, DECODE = Assignment(role=ROLE_PREFILL), Assignment(role=ROLE_MIXED)


def listed(**roles: str) -> list[dict[str, Any]]:
    """Return workers as the planner lists them; a colon names a budget."""
    found = []
    for name, role in roles.items():
        word, _, budget = role.partition(":")
        found.append({"id": name, "model": "sim", "state": "ready", "role": word, "budget_tokens": int(budget or 0)})
    return found


@pytest.mark.parametrize(("known", "movers", "wanted", "said"), [
    (listed(p="prefill", d="decode"), "p", DECODE, "p is the last worker of sim that computes prompts"),
    (listed(p="prefill", q="prefill", d="decode"), "pq", DECODE, "p, q are the last workers of sim"),
    (listed(p="prefill", d="decode"), "d", PREFILL, "d is the last worker of sim that decodes"),
    (listed(m="mixed:64", d="decode"), "m", DECODE, "m is the last worker of sim that computes prompts"),
])  # fmt: skip
def test_moves_that_leave_no_worker_for_a_phase_are_refused(
    known: list[dict[str, Any]], movers: str, wanted: Assignment, said: str
) -> None:
    with pytest.raises(Conflict, match=said) as refused:
        change._check_others(dict.fromkeys(movers, wanted), known)
    assert "--force" in refused.value.message


@pytest.mark.parametrize(("known", "movers", "wanted"), [
    (listed(p="prefill", q="prefill", d="decode"), "p", DECODE),
    (listed(p="prefill", d="decode:64"), "p", DECODE),
    (listed(d="decode", e="decode"), "d", DECODE),
    (listed(d="mixed:64"), "d", DECODE),
])  # fmt: skip
def test_other_moves_are_accepted(known: list[dict[str, Any]], movers: str, wanted: Assignment) -> None:
    change._check_others(dict.fromkeys(movers, wanted), known)


def roles_of(words: str, known: list[dict[str, Any]]) -> dict[str, Assignment]:
    return {worker["id"]: wanted for worker, wanted in change.wanted_roles(change.split_groups(words.split()), known)}


def test_several_groups_of_workers_get_a_role_each() -> None:
    known = listed(a="decode", b="decode", c="prefill", d="prefill", e="decode")
    assert roles_of("a b prefill", known) == {"a": PREFILL, "b": PREFILL}
    assert roles_of("a b prefill c d decode", known) == {"a": PREFILL, "b": PREFILL, "c": DECODE, "d": DECODE}
    assert roles_of("a mixed:64 a mixed:64", known) == {"a": Assignment(role=ROLE_MIXED, budget_tokens=64)}


def test_moves_of_several_groups_are_checked_together() -> None:
    known = listed(p="prefill", d="decode")
    change._check_others(roles_of("p decode d prefill", known), known)  # a swap leaves one of each
    with pytest.raises(Conflict, match="p, d are the last workers of sim that compute prompts"):
        change._check_others(roles_of("p decode d standby", known), known)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a prefill decode", "no worker is named before decode"),
        ("prefill a decode", "no worker is named before prefill"),
        ("a prefill b", "role 'b' is unknown"),
        ("a prefill b decode:3", "role 'decode:3' is unknown"),
        ("a prefill b nothing", "role 'nothing' is unknown"),
        ("a prefill x decode", "there is no worker 'x' here; there are: a, b"),
        ("a prefill a b decode", "a is given two roles, prefill and decode: name one"),
    ],
)
def test_contradictory_groups_are_refused_before_anything_is_sent(words: str, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        roles_of(words, listed(a="prefill", b="decode"))
