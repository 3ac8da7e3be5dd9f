"""Late first tokens are never counted for more than they are."""

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.verdict.late import LATE_NS, FirstTokens, Punctuality

LOOK_NS = 100_000_000
LIMIT_NS = 4_000_000_000
LAST_NS = 20_000_000_000
sent = st.lists(st.tuples(st.integers(0, LAST_NS), st.integers(0, 2 * LIMIT_NS)), max_size=40)


@given(sent)
def test_requests_count_as_late_from_their_target_until_a_span_after_their_first_token(
    requests: list[tuple[int, int]],
) -> None:
    """None of them has ended. Some are missed where another becomes overdue between the same two looks."""
    seen, missed, before = FirstTokens(), list[tuple[int, int]](), set[int]()
    for now_ns in range(0, LAST_NS, LOOK_NS):
        waiting = [at for at, (sent, took) in enumerate(requests) if sent <= now_ns < sent + took]
        overdue = {at for at in waiting if now_ns - requests[at][0] > LIMIT_NS}
        found = seen.look(
            "m", Punctuality(0, 0), ended=0, waiting=len(waiting), overdue=len(overdue), now_ns=now_ns
        )  # fmt: skip
        missed.append((now_ns, min(len(overdue - before), len(before - overdue))))
        came = [sum(each) for each in requests if each[1] > LIMIT_NS + LOOK_NS]
        certain = sum(now_ns - LATE_NS + LOOK_NS < at_ns <= now_ns for at_ns in came) + len(overdue)
        possible = sum(
            now_ns - LATE_NS - LOOK_NS < sum(each) <= now_ns for each in requests if each[1] > LIMIT_NS
        ) + len(overdue)  # fmt: skip
        unseen = sum(count for at_ns, count in missed if at_ns > now_ns - LATE_NS)
        assert certain - unseen <= found.late <= possible
        assert len(waiting) <= found.requests and found.late <= found.requests
        before = overdue
