"""Tests of how `make bench-operator` counts role changes."""

from load.verdict.bench_operator import CHANGE_S, Look, _role_changes


def looks(*roles: tuple[float, str], life: str = "running") -> list[Look]:
    return [
        Look(
            at_s=at_s, code="", sentence="", command="", pressures=None, planned=None, recommended=frozenset(),
            advised=frozenset(), lives=(("w", life),), planner_lives=(), alerts=(), roles=(("w", role),), unsaid="",
        )
        for at_s, role in roles
    ]  # fmt: skip


def test_a_worker_lent_to_prompts_and_then_moved_does_not_count_as_back_and_forth() -> None:
    assert _role_changes(looks((0, "decode"), (1, "mixed"), (2, "prefill"))) == (2, 0)


def test_a_worker_that_returns_within_ten_seconds_counts_as_back_and_forth() -> None:
    assert _role_changes(looks((0, "decode"), (1, "prefill"), (2, "mixed"))) == (2, 1)
    assert _role_changes(looks((0, "decode"), (1, "prefill"), (1 + CHANGE_S, "mixed"))) == (2, 0)


def test_a_worker_absent_for_a_while_has_not_changed_its_role() -> None:
    assert _role_changes(looks((0, "decode"), (1, ""), (2, "prefill"))) == (0, 0)


def test_the_role_of_a_killed_worker_after_its_restart_is_no_change() -> None:
    before, after = looks((1, "mixed"), life="silent"), looks((2, "decode"), (3, "mixed"))
    assert _role_changes([*looks((0, "mixed")), *before, *after]) == (1, 0)
