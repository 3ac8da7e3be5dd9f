"""`fulcrum role`: which moves it refuses before it asks a worker."""

from typing import Any

import pytest

from libs.cli.suite import role as change
from libs.contracts.errors import Conflict
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, Assignment

PREFILL, DECODE = Assignment(role=ROLE_PREFILL), Assignment(role=ROLE_MIXED)


def listed(**roles: str) -> list[dict[str, Any]]:
    """As the planner lists them; a colon names a budget."""
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
def test_moves_that_leave_nobody_for_a_phase_are_refused(
    known: list[dict[str, Any]], movers: str, wanted: Assignment, said: str
) -> None:
    with pytest.raises(Conflict, match=said) as refused:
        change._check_others([each for each in known if each["id"] in movers], known, wanted)
    assert "--force" in refused.value.message


@pytest.mark.parametrize(("known", "movers", "wanted"), [
    (listed(p="prefill", q="prefill", d="decode"), "p", DECODE),
    (listed(p="prefill", d="decode:64"), "p", DECODE),
    (listed(d="decode", e="decode"), "d", DECODE),
    (listed(d="mixed:64"), "d", DECODE),
])  # fmt: skip
def test_others_pass(known: list[dict[str, Any]], movers: str, wanted: Assignment) -> None:
    change._check_others([each for each in known if each["id"] in movers], known, wanted)
