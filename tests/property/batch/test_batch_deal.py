"""Properties of dealing and forecasts of batch jobs: bounds, shares of tenants, order within one, sums."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.policy.batch import (
    AHEAD_S,
    LEAST_OPEN_LINES,
    MAX_OPEN_LINES,
    SHARE_LINES,
    OpenJob,
    deal,
    queues_of,
    room_for,
)
from services.gateway.batch.job import LineRate, ends_s, news
from services.gateway.batch.lines import BatchLine
from services.gateway.batch.runner import by_prefix

S = 1_000_000_000
NOW_NS = 1_000 * S


@st.composite
def standings(draw: st.DrawFn) -> list[OpenJob]:
    return [
        OpenJob(
            job_id=f"job-{number}",
            tenant=draw(st.sampled_from("abc")),
            priority=draw(st.integers(-1, 1)),
            created_unix_ns=draw(st.integers(0, 5)) * S,
            expires_unix_ns=NOW_NS + draw(st.integers(-10, 4000)) * S,
            open_lines=draw(st.integers(0, 3 * SHARE_LINES)),
            undealt_lines=draw(st.integers(0, 30 * SHARE_LINES)),
            stopped=draw(st.integers(0, 9)) == 0,
        )
        for number in range(draw(st.integers(0, 8)))
    ]


@given(st.floats(0, 1e4))
def test_half_a_minute_of_work_is_dealt_within_bounds_and_the_minimum_while_the_pace_is_unknown(per_s: float) -> None:
    assert room_for(None) == room_for(0.0) == LEAST_OPEN_LINES
    assert LEAST_OPEN_LINES <= room_for(per_s) <= MAX_OPEN_LINES
    if LEAST_OPEN_LINES < room_for(per_s) < MAX_OPEN_LINES:
        assert abs(room_for(per_s) - per_s * AHEAD_S) <= 1


@given(standings(), st.one_of(st.none(), st.floats(0, 300)))
def test_dealt_lines_exist_and_fit_and_leave_no_room_while_there_are_more(
    jobs: list[OpenJob], per_s: float | None
) -> None:
    turns = Counter(deal(jobs, NOW_NS, per_s))
    by_id = {job.job_id: job for job in jobs}
    dealt = {job_id: min(count * SHARE_LINES, by_id[job_id].undealt_lines) for job_id, count in turns.items()}
    for job_id, count in turns.items():
        assert (count - 1) * SHARE_LINES < by_id[job_id].undealt_lines
    was_open, left = sum(job.open_lines for job in jobs), sum(job.undealt_lines for job in jobs)
    open_lines = was_open + sum(dealt.values())
    assert open_lines < max(room_for(per_s) + SHARE_LINES, was_open + 1)
    assert open_lines >= min(room_for(per_s), was_open + left)


@given(standings())
def test_tenants_get_equal_shares_while_they_have_lines(jobs: list[OpenJob]) -> None:
    turns = Counter(deal(jobs, NOW_NS, None))
    open_lines: Counter[str] = Counter()
    starved = set()
    before: Counter[str] = Counter()
    for job in jobs:
        dealt = min(turns[job.job_id] * SHARE_LINES, job.undealt_lines)
        open_lines[job.tenant] += job.open_lines + dealt
        before[job.tenant] += job.open_lines
        if job.undealt_lines > dealt:
            starved.add(job.tenant)
    for tenant in starved:
        for other in open_lines:
            # No tenant is given more while one with less waits.
            assert open_lines[other] <= max(open_lines[tenant] + SHARE_LINES, before[other])


@given(standings(), st.floats(0.1, 100))
def test_within_a_tenant_priority_precedes_the_window_and_hopeless_jobs_come_last(
    jobs: list[OpenJob], per_s: float
) -> None:
    for queue in queues_of(jobs, NOW_NS, per_s).values():
        keys = [
            (not job.stopped, -job.priority, job.left_lines * S > per_s * max(job.expires_unix_ns - NOW_NS, 0))
            for job in queue
        ]
        assert keys == sorted(keys)


@given(standings(), st.floats(0.1, 1000))
def test_predicted_ends_add_up_to_all_lines_and_no_later_job_of_a_tenant_ends_first(
    jobs: list[OpenJob], per_s: float
) -> None:
    ends = ends_s(jobs, NOW_NS, per_s)
    assert ends.keys() == {job.job_id for job in jobs}
    total = sum(job.left_lines for job in jobs)
    assert abs(max(ends.values(), default=0.0) - total / per_s) < 1e-6 * (1 + total / per_s)
    for queue in queues_of(jobs, NOW_NS, per_s).values():
        found = [ends[job.job_id] for job in queue]
        assert found == sorted(found)


def standing(left_s: float) -> OpenJob:
    return OpenJob("job", "a", 0, 0, NOW_NS + int(left_s * S), 0, 1)


@given(st.floats(1, 1e5), st.floats(0, 2e5))
def test_a_job_is_late_beyond_its_window_and_reported_once(left_s: float, end_s: float) -> None:
    reported = news(standing(left_s), None, end_s, NOW_NS)
    assert reported is not None
    assert reported.late == (end_s > 1.05 * left_s)
    assert news(standing(left_s), reported, end_s, NOW_NS) is None
    assert news(standing(left_s), reported, None, NOW_NS) == (pb.Foretold(late=True))


def test_the_pace_counts_only_time_with_work_and_nothing_before_it() -> None:
    rate = LineRate()
    assert rate.per_s(NOW_NS) is None
    rate.work_begins(NOW_NS)
    rate.add(NOW_NS + S, 50)
    assert rate.per_s(NOW_NS + S) is None
    assert rate.per_s(NOW_NS + 5 * S) == 10
    assert rate.per_s(NOW_NS + 100 * S) == 0
    rate.work_begins(NOW_NS + 200 * S)
    rate.add(NOW_NS + 202 * S, 8)
    assert rate.per_s(NOW_NS + 204 * S) == 2


@given(st.lists(st.tuples(st.text("ab", max_size=4), st.booleans())))
def test_lines_with_equal_prompt_prefixes_are_neighbours_and_each_occurs_once(lines: list[tuple[str, bool]]) -> None:
    made = [
        BatchLine(place + 1, place, str(place), f'{{"model":"m","n":{place},"prompt":"{prompt}"}}'.encode(), None)
        if good
        else BatchLine(place + 1, place, "", b"{", ValueError())  # type: ignore[arg-type]
        for place, (prompt, good) in enumerate(lines)
    ]
    order = by_prefix(made)
    assert sorted(order) == list(range(len(lines)))
    requested = [lines[place][0] + '"' for place in order if lines[place][1]]
    assert requested == sorted(requested)
