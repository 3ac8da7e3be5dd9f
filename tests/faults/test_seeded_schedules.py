"""The seeded fault test on a few seeds, that it replays exactly, and that it would notice."""

import subprocess
import sys
from typing import Any

import pytest

from libs.policy.worker.credits import CreditPool
from libs.worker.assignment import AssignmentState
from libs.worker.outbox import Outbox
from load.chaos.run import Plan, run_seed

SHORT = Plan(requests=60)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_request_is_lost_doubled_or_wrong_and_nothing_is_left(seed: int) -> None:
    result = run_seed(seed, SHORT)
    assert result.wrong == []
    assert result.requests == SHORT.requests
    assert sum(result.faults.values()) > 2


def test_a_seed_gives_the_same_course_in_any_process() -> None:
    here = run_seed(7, SHORT)
    command = (sys.executable, "-m", "load.chaos", "--seed", "7", "--requests", str(SHORT.requests), "--json")
    there = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert f'"7": "{here.digest:08x}"' in there.stdout


def test_seeds_differ() -> None:
    assert run_seed(1, Plan(requests=5)).digest != run_seed(2, Plan(requests=5)).digest


def test_a_lost_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Outbox.add_tokens
    calls = []

    def forgetful(self: Any, output: Any) -> None:
        calls.append(output)
        if len(calls) % 50:
            add(self, output)

    monkeypatch.setattr(Outbox, "add_tokens", forgetful)
    assert any("said" in wrong for wrong in run_seed(1, SHORT).wrong)


def test_an_epoch_that_two_win_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take = AssignmentState.set_role

    def lenient(self: Any, *, expected_epoch: int, **fields: Any) -> Any:
        return take(self, expected_epoch=self.current.epoch, **fields)

    monkeypatch.setattr(AssignmentState, "set_role", lenient)
    assert any("were taken at epoch" in wrong for wrong in run_seed(2, Plan(requests=200)).wrong)


def test_a_leaked_slot_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    free = CreditPool.free
    calls = []

    def forgetful(self: Any) -> None:
        calls.append(self)
        if len(calls) % 5:
            free(self)

    monkeypatch.setattr(CreditPool, "free", forgetful)
    assert any("at rest" in wrong for wrong in run_seed(1, SHORT).wrong)
