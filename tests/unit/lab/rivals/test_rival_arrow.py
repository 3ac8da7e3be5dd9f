"""Tests of Arrow as a rival, with expected values worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from libs.lab.cluster.books import LabOutcome
from libs.lab.experiment import Experiment, run
from libs.lab.hardware import resolve
from libs.lab.policies import policy_named
from libs.lab.rivals.arrow import arrow
from libs.lab.rivals.port import Move, RivalMover, RivalRouter, SeenRequest, SeenWorker
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.policy.roles import Role
from tests.rival_rig import cluster, mixed, prefill, request, seen

BUDGET = 8000
"""The budget of decode instances for prompts that spill over."""


def mover() -> RivalMover:
    built = arrow().mover(cluster())
    assert built is not None
    return built


def decoder(index: int, sequences: int, kv_tokens: int = 0) -> SeenWorker:
    return mixed(index, budget_tokens=BUDGET, decodes=sequences, kv_tokens=kv_tokens)


def test_a_prompt_goes_to_the_least_backlog_while_that_meets_the_ttft_target() -> None:
    router = arrow().router(cluster())
    workers = [prefill(0, prompt_tokens=9500), prefill(1, prompt_tokens=9000), decoder(2, 29), decoder(3, 5)]
    # 900 ms of backlog against a target of 1 s.
    assert router.prompt(request(), workers, 0) == 1


def test_a_prompt_spills_to_the_idlest_decode_instance_when_every_backlog_is_over_the_target() -> None:
    router = arrow().router(cluster())
    sources = [prefill(0, prompt_tokens=12_000), prefill(1, prompt_tokens=11_000)]
    # With this request of 1,000 tokens: instance 2 at 10 + 30 + (1,000 + 1,000) x 0.001 = 42 ms, the first within
    # 50 ms; instance 3 at 10 + 6 + 1 = 17 ms, the lowest, and below 50 x (2 - 1) / 2 = 25 ms.
    assert router.prompt(request(1000), [*sources, decoder(2, 29, 1000), decoder(3, 5)], 0) == 3
    # With 14 sequences instance 3 is at 10 + 15 + 1 = 26 ms, not below 25.
    assert router.prompt(request(1000), [*sources, decoder(2, 29, 1000), decoder(3, 14)], 0) == 1
    # The first that meets the target is the lowest: the request will decode there, so its prompt does not go there.
    assert router.prompt(request(1000), [*sources, decoder(2, 5), decoder(3, 29)], 0) == 1


def test_a_decode_goes_to_the_first_instance_within_the_tpot_target_or_to_the_lowest() -> None:
    router = arrow().router(cluster())
    # 42 ms and 17 ms: the first fits. 10 + 41 + 1 = 52 ms and 10 + 40 + 1 = 51 ms: neither, so the lowest.
    assert router.decode(request(1000), 0, [prefill(0), decoder(1, 29, 1000), decoder(2, 5)], 0) == 1
    assert router.decode(request(1000), 0, [prefill(0), decoder(1, 40), decoder(2, 39)], 0) == 2


def test_the_least_loaded_prefill_instance_flips_when_no_decode_instance_meets_tpot() -> None:
    # 10 + 46 + 1 = 57 ms on each; mean backlog (500 + 600 + 800) / 3 = 633 ms, below 1 s x 2/3 = 667 ms.
    decoders = [decoder(3, 45), decoder(4, 45), decoder(5, 45)]
    prefills = [prefill(0, prompt_tokens=6000), prefill(1, prompt_tokens=5000), prefill(2, prompt_tokens=8000)]
    moves = mover().moves(seen([*prefills, *decoders], arrived=1, mean_input_tokens=1000))
    assert moves == [Move(1, Role.MIXED, BUDGET, "no decode meets TPOT")]
    # 1 s more backlog at one of them: 967 ms on average, and no fewer decode than prefill instances.
    prefills[2] = prefill(2, prompt_tokens=18_000)
    assert not mover().moves(seen([*prefills, *decoders], arrived=1, mean_input_tokens=1000))
    # With fewer decode instances than prefill instances the backlog does not matter.
    assert mover().moves(seen([*prefills, *decoders[:2]], arrived=1, mean_input_tokens=1000))


def test_nothing_flips_while_no_request_arrives_or_a_decode_instance_meets_tpot() -> None:
    prefills = [prefill(0), prefill(1)]
    assert not mover().moves(seen([*prefills, decoder(2, 45)]))
    # 10 + 39 + 1 = 50 ms: within the target.
    assert not mover().moves(seen([*prefills, decoder(2, 38)], arrived=1, mean_input_tokens=1000))


def test_a_decode_instance_flips_when_it_empties_but_not_one_that_was_empty_all_along() -> None:
    looks = mover()
    assert not looks.moves(seen([prefill(0), decoder(1, 3), decoder(2, 2), decoder(3, 0)]))
    moves = looks.moves(seen([prefill(0), decoder(1, 0), decoder(2, 2), decoder(3, 0)]))
    assert moves == [Move(1, Role.PREFILL, 0, "decode emptied")]


def test_one_decode_instance_stays_when_all_empty_at_once() -> None:
    looks = mover()
    looks.moves(seen([prefill(0), decoder(1, 3), decoder(2, 2)]))
    assert [move.index for move in looks.moves(seen([prefill(0), decoder(1, 0), decoder(2, 0)]))] == [1]


def test_arrow_starts_with_an_even_split_and_moves_at_no_cost() -> None:
    rival = arrow()
    assert [move.role for move in rival.first_roles(cluster(5))] == [Role.PREFILL] * 2 + [Role.MIXED] * 3
    assert not rival.move_cost.restarts
    assert rival.move_cost.start_ns == 0


@pytest.mark.usefixtures("quiet_lab")
def test_a_bound_decode_counts_on_its_instance_from_its_arrival() -> None:
    trace = generate("poisson:rate=20,seconds=20,isl=2000,osl=100", seed=1)
    base = Experiment(trace, resolve("llama-3.1-8b", "h100"), 4, parse_slo("ttft=max(2s,3x),tpot=50ms"))
    seen: list[tuple[int, int]] = []

    class Watched:
        """Arrow's router, which records the looks it gets."""

        def __init__(self, router: RivalRouter) -> None:
            self.router = router

        def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
            return self.router.prompt(request, workers, now_ns)

        def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
            seen.append((request.number, sum(each.decodes + each.queued_decodes for each in workers)))
            return self.router.decode(request, source, workers, now_ns)

    policy = policy_named("arrow:2:2", 4)
    assert policy.rival is not None
    rival = replace(policy.rival, router=lambda cluster: Watched(arrow().router(cluster)), mover=lambda cluster: None)
    _, result = run(base, replace(policy, rival=rival))
    assert all(answer.outcome is LabOutcome.COMPLETED for answer in result.answers)
    assert [number for number, _ in seen] == list(range(len(trace.requests))), "each once, as it arrives"
    # Of requests that came in quick succession, the later one sees the former at a decode instance.
    assert max(there for _, there in seen[:3]) >= 1
