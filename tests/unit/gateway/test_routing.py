"""Tests of routing: cached prefixes, backlogs, KV transfer and room, weighed in predicted time."""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.reports import EngineEvent, KvTransferReport
from libs.perfmodel.profiles import PROFILES, prior_speed
from libs.perfmodel.wire import speed_message, speed_of
from libs.policy.gateway.binding import MOST_HELD, LeastLoaded, PredictedTtft, RoundRobin, bind
from libs.policy.gateway.outlook import SubmitLoad, lend_speeds
from libs.policy.gateway.view import BindingRequest, WorkerView
from libs.policy.speed import Speed
from libs.testing.workers.hosts import local_worker
from services.gateway.link import outlook_of, read_report

SPEED = replace(prior_speed("sim", "sim:llama-8b-h100", 2048), kv_token_ns=10_000.0)
PROMPT = 20_000


def prefill(worker_id: str, **fields: Any) -> WorkerView:
    values = {"load": 0, "prefill_credits": 4, "speed": SPEED, **fields}
    return WorkerView(worker_id, "m", "k", True, False, False, decode_credits=0, **values)


def decode(worker_id: str, **fields: Any) -> WorkerView:
    values = {"load": 0, "decode_credits": 64, "speed": SPEED, **fields}
    return WorkerView(worker_id, "m", "k", False, True, False, prefill_credits=0, **values)


def mixed(worker_id: str, **fields: Any) -> WorkerView:
    return replace(decode(worker_id, **fields), takes_both=True)


def where(ask: BindingRequest, *views: WorkerView, policy: Any = None) -> tuple[str | None, str]:
    (binding,) = bind([ask], views, policy or PredictedTtft())
    return binding.prompt_worker, binding.decode_worker


def ask(key: int = 1, **cached: int) -> BindingRequest:
    return BindingRequest(key, "m", tokens=PROMPT, cached_tokens=cached)


def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    assert where(ask(p1=PROMPT - 64), prefill("p0"), prefill("p1", load=3), decode("d")) == ("p1", "d")


def test_a_holder_whose_backlog_outweighs_the_saved_prefill_is_not_chosen() -> None:
    busy = prefill("p1", load=1, reported_backlog_ns=2e9)
    assert where(ask(p1=PROMPT - 64), prefill("p0"), busy, decode("d")) == ("p0", "d")
    assert where(ask(p1=PROMPT - 64), prefill("p0", reported_backlog_ns=3e9), busy, decode("d")) == ("p1", "d")


def test_an_overloaded_holder_of_a_common_prefix_does_not_attract_every_prompt() -> None:
    """One system prompt is cached on one worker, and a flood of requests begins with it."""
    asks = [BindingRequest(key, "m", tokens=8_000, cached_tokens={"p0": 4_000}) for key in range(32)]
    views = [*(prefill(f"p{number}", prefill_credits=32) for number in range(4)), decode("d")]
    bound = Counter(binding.prompt_worker for binding in bind(asks, views, PredictedTtft()))
    assert max(bound.values()) <= 2 * min(bound.values())
    assert bound["p0"] == max(bound.values())  # it is the quickest at each of them


def test_equal_predictions_are_spread_by_load_and_then_in_turn() -> None:
    views = [prefill("p0", load=2), prefill("p1", load=1), prefill("p2", load=1, turn=5), decode("d")]
    assert where(ask(), *views)[0] == "p1"
    one_after_the_other = []
    for turn in range(6):  # each has ended before the next one comes: no load, and nothing cached
        views = [prefill(f"p{n}", turn=one_after_the_other.index(f"p{n}") + 1 if f"p{n}" in one_after_the_other else 0)
                 for n in range(3)]  # fmt: skip
        worker = where(ask(turn), *views, decode("d"))[0]
        assert worker is not None
        if worker in one_after_the_other:
            one_after_the_other.remove(worker)
        one_after_the_other.append(worker)
    assert sorted(one_after_the_other) == ["p0", "p1", "p2"]


def test_a_prefix_that_saves_next_to_nothing_does_not_outweigh_load() -> None:
    assert where(ask(p1=512), prefill("p0"), prefill("p1", load=1), decode("d")) == ("p0", "d")


def test_the_faster_worker_gets_the_longer_queue() -> None:
    slow = Speed(PROFILES["llama-70b-tp4-h100"].step_time, 2048)
    assert (
        where(ask(), prefill("p0", speed=slow), prefill("p1", load=1, reported_backlog_ns=2e8), decode("d"))[0] == "p1"
    )


def test_an_old_load_report_counts_less_as_time_passes() -> None:
    old = prefill("p0", load=1, reported_backlog_ns=1e9, reported_unix_ns=0)
    new = prefill("p1", load=1, reported_backlog_ns=5e8, reported_unix_ns=900_000_000)
    (binding,) = bind([ask()], [old, new, decode("d")], PredictedTtft(), now_ns=900_000_000)
    assert binding.prompt_worker == "p0"


def test_a_prompt_avoids_a_mixed_worker_whose_decodes_slow_it_down() -> None:
    views = [mixed("m", decode_sequences=60, kv_tokens=400_000), prefill("p"), decode("d")]
    assert where(ask(), *views) == ("p", "d")
    assert where(ask(m=PROMPT - 64), *views) == ("m", "m")


def test_a_prompt_that_would_be_late_on_a_mixed_worker_leaves_it_to_one_that_is_in_time_there() -> None:
    urgent, patient = replace(ask(1), due_ns=1_000), replace(ask(2), due_ns=10**12)
    busy, shared = prefill("p", prefill_credits=0), mixed("m", decode_credits=1)

    def bound(asks: list[BindingRequest], *views: WorkerView) -> list[tuple[int, str | None]]:
        return [(each.sequence_id, each.prompt_worker) for each in bind(asks, views, PredictedTtft())]

    assert bound([urgent, patient], busy, shared) == [(2, "m")]
    assert bound([urgent], busy, shared) == [(1, "m")], "an idle worker helps nobody"
    assert bound([urgent, patient], shared) == [(1, "m")], "no worker computes it sooner"
    assert bound([replace(urgent, due_ns=0), patient], busy, shared) == [(1, "m")], "it is late anyway"


def test_a_round_lets_a_bounded_number_of_prompts_wait_for_prefill_workers() -> None:
    asks = [replace(ask(key), due_ns=1_000) for key in range(MOST_HELD + 2)]
    asks[-1] = replace(asks[-1], due_ns=10**12)
    workers = [prefill("p", prefill_credits=0), mixed("m", decode_credits=1)]
    (binding,) = bind(asks, workers, PredictedTtft())
    assert binding.sequence_id == 0, "the last one is not looked at"
    (binding,) = bind(asks[2:], workers, PredictedTtft())
    assert binding.sequence_id == MOST_HELD + 1


def test_nothing_late_or_without_a_deadline_passes_a_prompt_that_lets_others_pass() -> None:
    urgent, late, line = replace(ask(1), due_ns=1_000), ask(2), replace(ask(3), batch=True)
    workers = [prefill("p", prefill_credits=0), mixed("m", decode_credits=1)]
    assert [each.sequence_id for each in bind([urgent, late, line], workers, PredictedTtft())] == [1]


def test_a_prompt_that_lets_others_pass_is_bound_although_a_later_one_finds_no_room() -> None:
    urgent, stuck = replace(ask(1), due_ns=1_000), replace(ask(2), kv_kind="other")
    workers = [prefill("p", prefill_credits=0), mixed("m", decode_credits=1)]
    assert [each.sequence_id for each in bind([urgent, stuck], workers, PredictedTtft())] == [1]


def test_the_decode_worker_with_the_earliest_second_token_is_chosen() -> None:
    views = [prefill("p"), decode("d0", decode_sequences=60, kv_tokens=400_000), decode("d1", load=9)]
    assert where(ask(), *views)[1] == "d1"
    held = replace(ask(), cached_tokens={"d0": PROMPT - 64}, kv_kind="k")
    assert where(held, decode("d0", load=2, decode_sequences=2), decode("d1"))[1] == "d0"
    assert (
        where(replace(held, cached_tokens={}), decode("d0", arriving_kv_tokens=50_000), decode("d1", load=1))[1] == "d1"
    )


def test_a_transfer_hidden_behind_its_prompt_costs_nothing() -> None:
    (hidden,) = bind([ask()], [prefill("p"), decode("d")], PredictedTtft())
    (shown,) = bind([ask(p=PROMPT - 1)], [prefill("p"), decode("d")], PredictedTtft())
    step_ns = SPEED.decode_ns(1, PROMPT)
    assert hidden.predicted.second_ns == step_ns
    assert shown.predicted.second_ns > step_ns + PROMPT * SPEED.kv_token_ns / 2


def test_a_worker_without_room_for_the_kv_is_the_last_choice() -> None:
    assert (
        where(
            ask(p0=PROMPT // 2), prefill("p0", free_kv_tokens=64), prefill("p1", reported_backlog_ns=1e9), decode("d")
        )[0]
        == "p1"
    )
    full = decode("d0", free_kv_tokens=PROMPT - 1)
    assert where(ask(), prefill("p"), full, decode("d1", load=50, decode_sequences=50))[1] == "d1"
    assert where(ask(), prefill("p"), full)[1] == "d0"


def test_baselines_ignore_every_other_signal() -> None:
    views = [prefill("p0", load=2, turn=1), prefill("p1", load=1, turn=2), decode("d")]
    assert where(ask(p0=PROMPT - 64), *views, policy=LeastLoaded())[0] == "p1"
    assert where(ask(p1=PROMPT - 64), *views, policy=RoundRobin())[0] == "p0"
    asks = [replace(ask(key), tokens=64) for key in range(6)]
    taken = [binding.prompt_worker for binding in bind(asks, views, RoundRobin())]
    assert taken == ["p0", "p1"] * 3


@pytest.mark.parametrize("credits_each", [1, 64])
def test_a_round_over_a_long_queue_is_cheap(credits_each: int) -> None:
    """128 waiting, 16 workers; the bound leaves room for a slow machine under load."""
    views = [prefill(f"p{number}", prefill_credits=credits_each) for number in range(8)]
    views += [decode(f"d{number}") for number in range(8)]
    asks = [BindingRequest(key, "m", tokens=100, cached_tokens={"p1": key, "p3": 90}) for key in range(128)]
    spent_s = []
    for _ in range(5):
        start_s = time.process_time()
        bound = bind(asks, views, PredictedTtft())
        spent_s.append(time.process_time() - start_s)
    assert len(bound) == min(128, 8 * credits_each)
    assert min(spent_s) / len(bound) < 200e-6


# ------------------------------------------------------------ what a worker has before it


def worker(**capabilities: int) -> common.Worker:
    values = {"block_size_tokens": 16, "kv_blocks": 1000, "chunk_tokens": 2048, "streams_kv": True, **capabilities}
    return common.Worker(
        id="w", engine="sim", device="sim:llama-8b-h100", capabilities=common.Capabilities(**values),
        assignment=common.Assignment(model="m", role=common.ROLE_PREFILL),
    )  # fmt: skip


def worker_frame(submits_taken: int, tokens: int = 0) -> pb.WorkerFrame:
    load = common.Load(
        running=1 if tokens else 0,
        waiting_prefill_tokens=tokens,
        waiting_prefill_squares=tokens**2,
        free_kv_blocks=1000,
    )
    return pb.WorkerFrame(load=load, submits_taken=submits_taken)


def test_a_submit_counts_until_the_worker_reports_it() -> None:
    who = worker()
    outlook = outlook_of(who)

    def backlog_ns() -> float:
        return outlook.view(who, "k", prefill_credits=1, decode_credits=0).backlog_ns(0)

    assert backlog_ns() == 0
    outlook.sent(1, SubmitLoad.of(1000, {"w": 400}, "w", pb.PHASE_PREFILL))
    outlook.sent(2, SubmitLoad.of(1000, {}, "w", pb.PHASE_PREFILL))
    both = backlog_ns()
    assert both == prior_speed("sim", "sim:llama-8b-h100", 2048).prompt_ns(1600, 2 * 1000**2 - 400**2)
    read_report(outlook, worker_frame(1, tokens=600), who, 0)
    view = outlook.view(who, "k", prefill_credits=1, decode_credits=0)
    assert (view.load, view.free_kv_tokens) == (2, 16_000 - 1000)
    assert view.unseen_ns == prior_speed("sim", "sim:llama-8b-h100", 2048).prompt_ns(1000, 1000**2)
    outlook.ended(2)
    outlook.ended(2)
    read_report(outlook, worker_frame(2), who, 0)
    assert backlog_ns() == 0


def test_a_reserved_decode_counts_until_it_arrives() -> None:
    who = worker()
    who.assignment.role = common.ROLE_MIXED
    outlook = outlook_of(who)
    outlook.reserved(800)
    view = outlook.view(who, "k", prefill_credits=0, decode_credits=1)
    assert (view.load, view.decode_sequences, view.arriving_kv_tokens, view.free_kv_tokens) == (1, 1, 800, 15_200)
    outlook.reserved(800, -1)
    outlook.sent(1, SubmitLoad.of(800, {"w": 160}, "w", pb.PHASE_DECODE))
    view = outlook.view(who, "k", prefill_credits=0, decode_credits=1)
    assert (view.load, view.decode_sequences, view.arriving_kv_tokens, view.free_kv_tokens) == (1, 1, 640, 15_360)


def test_a_speed_reported_by_a_worker_is_used() -> None:
    who = worker()
    outlook = outlook_of(who)
    slow = replace(SPEED, step_time=PROFILES["smollm2-135m-cpu"].step_time)
    read_report(outlook, pb.WorkerFrame(speed=speed_message(slow)), who, 0)
    assert outlook.speed == slow
    assert speed_of(speed_message(slow), 2048) == slow


def test_a_worker_without_measurements_is_assumed_as_fast_as_its_peers() -> None:
    known, new, other = outlook_of(worker()), outlook_of(worker()), outlook_of(worker())
    other.device = "cpu"
    guess = other.speed
    known.speed = replace(SPEED, step_time=PROFILES["smollm2-135m-cpu"].step_time, measured=True)
    lend_speeds([new, known, other])
    assert new.speed == replace(known.speed, measured=False)
    assert other.speed is guess


# ------------------------------------------------------------ the speed that a worker reports


@pytest.mark.system
async def test_a_worker_reports_its_tuned_chunk_size() -> None:
    async with local_worker("prefill-0", "prefill", prefill_chunk_tokens=512) as running:
        who, frame = running.host.worker(), pb.WorkerFrame()
        outlook = outlook_of(who)
        assert outlook.speed.chunk_tokens == 512
        running.host.speed.chunked(2048)
        running.host.speed.report(frame, None)
        read_report(outlook, frame, who, 0)
        assert outlook.speed.chunk_tokens == 2048


@pytest.mark.system
async def test_a_worker_reports_its_speed_once_and_after_each_change() -> None:
    async with local_worker("decode-0", "decode") as running:
        speed = running.host.speed
        first = pb.WorkerFrame()
        reported = speed.report(first, None)
        assert speed_of(first.speed, reported.chunk_tokens) == reported
        again = pb.WorkerFrame()
        assert speed.report(again, reported) is reported
        assert not again.HasField("speed")
        speed.learned(replace(reported.step_time, prefill_token_ns=77.0))
        assert speed.report(again, reported).measured
        assert again.speed.step_time.prefill_token_ns == 77.0


@pytest.mark.system
async def test_the_fastest_transfer_sets_the_speed_of_the_link() -> None:
    async with local_worker("decode-0", "decode") as running:
        speed = running.host.speed
        for blocks, duration_ns in ((100, 50_000_000), (100, 2_000_000), (100, 80_000_000), (1, 1_000)):
            transfer = KvTransferReport("r", "p", blocks, 0, 0, duration_ns, 16 * blocks, 0)
            speed.on_event(EngineEvent(kv_transfers=(transfer,)))
        assert speed.speed.kv_token_ns == pytest.approx(1250, rel=0.06)


@pytest.mark.parametrize("kv_token_ns", [-1.0, float("nan"), float("inf")])
def test_an_invalid_speed_is_ignored(kv_token_ns: float) -> None:
    who = worker()
    outlook = outlook_of(who)
    before, message = outlook.speed, speed_message(SPEED)
    message.kv_token_ns = kv_token_ns
    read_report(outlook, pb.WorkerFrame(speed=message), who, 0)
    assert outlook.speed is before


def test_a_prompt_that_becomes_a_vector_needs_no_decode_worker() -> None:
    pooled = replace(ask(), pooled=True)
    assert where(pooled, prefill("p0"), decode("d", decode_credits=0)) == ("p0", "")
    assert where(pooled, prefill("p0", load=2), prefill("p1")) == ("p1", "")
    assert where(pooled, mixed("m0")) == ("m0", "m0")
    assert bind([pooled], [prefill("p0", prefill_credits=0), decode("d")], PredictedTtft()) == []
    (binding,) = bind([pooled], [prefill("p0")], PredictedTtft())
    assert binding.predicted.ttft_ns > 0 and binding.predicted.second_ns == 0


def test_vectors_use_prefill_credits_and_no_decode_credits() -> None:
    asks = [replace(ask(key), pooled=key < 3) for key in range(1, 5)]
    asks = [replace(each, tokens=64) for each in asks]
    bound = bind(asks, [prefill("p0", prefill_credits=3), decode("d", decode_credits=1)], PredictedTtft())
    assert [(each.prompt_worker, each.decode_worker) for each in bound] == [("p0", ""), ("p0", ""), ("p0", "d")]
