"""Tests of requests that miss TTFT or TPOT although no phase is short of capacity."""

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_OK, RequestEvent
from libs.policy.verdict.causes import CauseCode
from libs.policy.verdict.late import LATE_NS, FirstTokens, Punctuality, late_causes
from libs.policy.verdict.state import Grade
from libs.policy.verdict.watch import VerdictWatch
from services.metrics.status.traffic import TrafficLog
from tests.unit.verdict.test_verdicts import LIMITS, S, state

NONE = Punctuality(0, 0)


def judged(requests, late):
    return next(late_causes(state(), Punctuality(requests, late), NONE), None)


def test_more_than_one_late_request_in_twenty_is_a_cause_and_a_chance_excess_is_not():
    assert judged(0, 0) is None
    assert judged(1_000, 20) is None
    assert judged(100, 4).grade is Grade.HOLD
    assert judged(100, 6).grade is Grade.FIRE
    assert judged(10, 2).grade is Grade.HOLD
    assert "6 of 100 requests are over their TTFT target of" in judged(100, 6).sentence


def test_answers_over_their_tpot_are_late_and_ttft_is_named_first():
    slow = next(late_causes(state(), Punctuality(100, 0), Punctuality(80, 9)))
    assert slow.grade is Grade.FIRE
    assert "9 of 80 answers are over their TPOT target of" in slow.sentence
    both = next(late_causes(state(), Punctuality(100, 50), Punctuality(80, 9)))
    assert "50 of 100 requests are over their TTFT" in both.sentence
    held = next(late_causes(state(), Punctuality(100, 4), Punctuality(80, 9)))
    assert "over their TPOT" in held.sentence


def test_other_prompts_are_said_to_delay_late_ones_only_while_some_wait():
    def said(waits_s):
        return next(late_causes(state(waits_s=waits_s), Punctuality(100, 6), NONE)).sentence

    assert "wait behind those that can still be in time: `fulcrum request --slowest` shows" in said(1.0)
    assert "wait behind" not in said(0.0) and said(0.0).endswith(
        ". `fulcrum request --slowest` shows where their time goes."
    )


def test_late_requests_are_named_only_if_no_other_cause_explains_them():
    watch, calm = VerdictWatch(LIMITS), state()
    late = [judged(100, 30)]
    watch.look([calm], S, late)
    assert watch.look([calm], S + LIMITS.for_ns, late).code is CauseCode.LATE
    flooded = state(prompts=6.0, decodes=20)
    watch.look([flooded], 5 * S, late)
    found = watch.look([flooded], 5 * S + LIMITS.for_ns, late)
    assert [each.code for each in found.causes if each.code is not CauseCode.LATE] == [CauseCode.PREFILL_BOUND]
    assert CauseCode.LATE not in {each.code for each in watch.look([flooded], 60 * S, late).causes}


def test_answers_count_at_the_time_of_their_first_token_and_by_their_own_limit():
    log = TrafficLog()

    def end(ttft_s, limit_s, *, at_s, decode_s=0.0):
        arrival = 100 * S
        log.take(
            RequestEvent(
                model="m", outcome=OUTCOME_OK, arrival_unix_ns=arrival, ttft_ns=round(ttft_s * S), output_tokens=11,
                decode_ns=round(decode_s * S),
                ttft_deadline_unix_ns=arrival + round(limit_s * S) if limit_s else 0,
            ),
            round(at_s * S),
        )  # fmt: skip

    end(6.0, 5.0, at_s=108)
    end(1.0, 5.0, at_s=108)
    end(6.0, 0.0, at_s=108)  # it named no limit
    end(6.0, 5.0, at_s=108, decode_s=5)  # its first token came at 103
    assert log.late("m", 109 * S, 3 * S) == Punctuality(2, 1)
    assert log.late("m", 112 * S, 3 * S) == NONE
    assert log.late("other", 109 * S, 3 * S) == NONE


def test_a_single_late_request_sustains_the_cause_only_if_it_is_one_in_twenty():
    assert judged(15, 1).grade is Grade.HOLD
    assert judged(21, 1) is None


def test_first_tokens_that_came_late_count_before_their_answers_end():
    seen, nothing = FirstTokens(), Punctuality(0, 0)

    def look(at_s, overdue, waiting=8, ended=10):
        return seen.look("m", nothing, ended=ended, waiting=waiting, overdue=overdue, now_ns=round(at_s * S))

    assert look(1.0, 4) == Punctuality(18, 4)
    assert look(1.1, 1) == Punctuality(18, 4), "three of the four had their first token"
    assert look(1.2, 0, waiting=0) == Punctuality(10, 4)
    assert look(1.3, 0, waiting=0, ended=0) == Punctuality(4, 4)
    assert look(1.15 + LATE_NS / S, 0, waiting=0) == Punctuality(10, 1)
    assert look(1.25 + LATE_NS / S, 0, waiting=0) == Punctuality(10, 0)


def test_one_request_that_goes_on_waiting_is_named_late_among_few_but_not_among_many():
    def found(waiting, *, until_s):
        seen, watch = FirstTokens(), VerdictWatch(LIMITS)
        for at_ms in range(1_000, round(until_s * 1_000), 100):
            first = seen.look("m", NONE, ended=9, waiting=waiting, overdue=1, now_ns=at_ms * S // 1_000)
            verdict = watch.look([state()], at_ms * S // 1_000, late_causes(state(), first, NONE))
        return verdict

    assert found(3, until_s=1.6).code is CauseCode.BALANCED, "it may be answered in a moment"
    assert found(3, until_s=2.3).sentence.startswith("Late: 1 of 12 requests is over their TTFT target of 5 s")
    assert found(30, until_s=9.0).code is CauseCode.BALANCED, "one late request of 39"


def test_a_request_found_overdue_after_a_gap_without_looks_has_only_begun_to_wait():
    tokens = FirstTokens()

    def look(at_ns):
        return tokens.look("m", NONE, ended=10, waiting=1, overdue=1, now_ns=at_ns)

    assert not look(0).waits
    assert not look(60 * S).waits
    assert not look(60 * S + S // 4).waits
    assert look(60 * S + S // 2).waits


def test_late_requests_are_named_for_a_second_after_they_have_left_the_span():
    watch, late = VerdictWatch(LIMITS), [judged(100, 30)]
    for at_ms in range(0, 1_000, 100):
        watch.look([state()], at_ms * S // 1_000, late)
    codes = [watch.look([state()], at_ms * S // 1_000).code for at_ms in range(1_000, 2_500, 100)]
    assert codes == [CauseCode.LATE] * 10 + [CauseCode.BALANCED] * 5


def test_few_late_requests_that_were_answered_at_once_are_chance():
    seen, watch = FirstTokens(), VerdictWatch(LIMITS)
    for at_ms in range(1_000, 9_000, 100):
        overdue = at_ms % 1_000 < 300  # another each second, late by less than half a second
        first = seen.look("m", NONE, ended=9, waiting=3, overdue=overdue, now_ns=at_ms * S // 1_000)
        first = Punctuality(first.requests, min(first.late, 2), first.waits)
        assert watch.look([state()], at_ms * S // 1_000, late_causes(state(), first, NONE)).code is CauseCode.BALANCED


def test_a_late_request_that_ended_counts_once():
    seen = FirstTokens()
    seen.look("m", Punctuality(0, 0), ended=0, waiting=5, overdue=3, now_ns=S)
    came = seen.look("m", Punctuality(6, 3), ended=7, waiting=2, overdue=0, now_ns=S + 1)
    assert came == Punctuality(9, 3)
    assert seen.look("other", Punctuality(6, 3), ended=6, waiting=2, overdue=0, now_ns=S + 2) == Punctuality(8, 3)


def test_tpot_is_compared_with_each_answers_own_target_and_a_single_token_has_none():
    log = TrafficLog()
    for tokens, decode_s, target_ms in ((11, 2.0, 100), (11, 0.5, 100), (11, 2.0, 300), (1, 2.0, 100), (11, 2.0, 0)):
        log.take(
            RequestEvent(
                model="m", outcome=OUTCOME_OK, ttft_ns=S, output_tokens=tokens, decode_ns=round(decode_s * S),
                tpot_target_us=target_ms * 1_000,
            ),
            100 * S,
        )  # fmt: skip
    assert log.slow("m", 101 * S, 3 * S) == Punctuality(3, 1)
    assert log.slow("m", 104 * S, 3 * S) == NONE


def test_ten_seconds_of_traffic_are_known_even_after_more_requests_than_are_stored(monkeypatch):
    monkeypatch.setattr("services.metrics.status.traffic.MAX_REQUESTS", 10)
    log = TrafficLog()
    for i in range(1, 45):
        event = RequestEvent(model="m", outcome=OUTCOME_OK, ttft_ns=i * 1_000_000, prompt_tokens=100, output_tokens=1)
        log.take(event, i * S // 10)
    found = log.traffic(45 * S // 10, [(1_000_000_000, 30)])
    assert (found.requests_per_s, found.prompt_tokens_per_s) == (1.0, 100.0)
    assert (found.ttft_p50_ms, found.ttft_p95_ms, found.awaited) == (1000.0, 1000.0, 30)
    assert log.traffic(45 * S // 10).ttft_p50_ms == 39.0
    assert log.traffic(139 * S // 10).requests_per_s == 0.5


def test_the_largest_figures_of_an_event_are_accepted():
    most, greatest = 2**62 - 1, 2**32 - 1
    log, event = TrafficLog(), RequestEvent(model="m", outcome=OUTCOME_OK)
    event.ttft_ns = event.decode_ns = most
    event.ttft_deadline_unix_ns = 2**63 - 1
    event.prompt_tokens = event.output_tokens = event.cached_tokens = event.tpot_target_us = greatest
    log.take(event, S)
    assert log.traffic(S).prompt_tokens_per_s == greatest / 10
    assert log.targets_ns("m") == (2**63 - 1, greatest * 1_000)
    assert log.prompt_lengths("m", S) == (greatest, 1.0)
    log.late("m", S, S)
