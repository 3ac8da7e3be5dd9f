"""Tests of arrivals as one gateway counts them."""

from dataclasses import dataclass, field

from libs.demand.counts import MAX_CLASSES, OTHER, REMEMBER_NS, ArrivalCounter, Counts, DemandKey, RowCounts
from libs.demand.wire import totals_message

KEY = DemandKey("m", "online", "acme")


@dataclass(eq=False)
class FakeAnswer:
    """A choice."""

    output: list[int] = field(default_factory=list)
    cached_tokens: int = 0


def total(counter: ArrivalCounter) -> Counts:
    return counter.rows().get(KEY, Counts())


def test_an_unfinished_answer_counts_its_tokens_so_far_and_not_as_ended() -> None:
    counter, answer = ArrivalCounter(), FakeAnswer()
    counter.admitted(KEY, [answer], 100, b"", 0)
    answer.output += [1, 2, 3]
    assert total(counter) == Counts(1, 1, 100, 0, 3, 0, 0)
    answer.output += [4]
    answer.cached_tokens = 64
    counter.ended(answer, well=True)
    assert total(counter) == Counts(1, 1, 100, 64, 4, 1, 0)
    assert counter.open == 0


def test_an_answer_whose_client_left_does_not_count_as_short() -> None:
    counter, answer = ArrivalCounter(), FakeAnswer([1])
    counter.admitted(KEY, [answer], 10, b"", 0)
    counter.ended(answer, well=False)
    assert total(counter).ended == 0


def test_a_refused_arrival_that_is_retried_and_accepted_counts_once() -> None:
    counter = ArrivalCounter()
    for at_ns in range(3):
        counter.refused(KEY, 1, b"same body", at_ns)
    counter.admitted(KEY, [FakeAnswer()], 100, b"same body", 4)
    assert total(counter) == Counts(requests=1, known_requests=1, prompt_tokens=100, refused=1)
    assert counter.retries == 3


def test_each_arrival_refused_by_a_full_queue_counts_once_and_separately() -> None:
    counter = ArrivalCounter()
    counter.refused(KEY, 4, b"", 0, full=True)
    counter.refused(KEY, 2, b"", 1)
    for at_ns in range(2, 5):
        counter.refused(KEY, 1, b"again", at_ns, full=True)
    assert total(counter).refused == 7
    (row,) = totals_message(("g", 1), 5, counter.rows(), counter.queue_full).counts
    assert (row.refused, row.queue_full) == (7, 5)


def test_an_accepted_request_dropped_later_counts_its_prompt_once_when_it_is_retried() -> None:
    counter, first = ArrivalCounter(), FakeAnswer()
    counter.admitted(KEY, [first], 100, b"same body", 0)
    counter.refused(KEY, 1, b"same body", 1, known=True)
    counter.ended(first, well=False)
    counter.admitted(KEY, [FakeAnswer()], 100, b"same body", 2)
    assert total(counter) == Counts(requests=1, known_requests=1, prompt_tokens=100)


def test_the_same_body_long_after_a_refusal_is_a_new_arrival() -> None:
    counter = ArrivalCounter()
    counter.refused(KEY, 1, b"body", 0)
    counter.refused(KEY, 1, b"body", REMEMBER_NS + 1)
    assert total(counter).requests == 2


def test_the_same_body_twice_in_a_row_is_two_arrivals_if_none_was_refused() -> None:
    counter = ArrivalCounter()
    for _ in range(2):
        counter.admitted(KEY, [FakeAnswer()], 5, b"body", 0)
    assert total(counter).requests == 2


def test_tenants_beyond_the_bound_are_counted_together_and_none_is_lost() -> None:
    book = RowCounts(max_rows=3)
    for number in range(50):
        book.add(DemandKey("m", "online", f"t{number}"), Counts(requests=1))
    rows = book.rows()
    assert len(rows) == 4
    assert rows[DemandKey("m", "online", OTHER)].requests == 47
    assert sum(each.requests for each in rows.values()) == 50


def test_classes_invented_by_clients_are_counted_together() -> None:
    book = RowCounts()
    for number in range(MAX_CLASSES + 5):
        book.add(DemandKey("m", f"c{number}", "acme"), Counts(requests=1))
    assert book.rows()[DemandKey("m", OTHER, "acme")].requests == 5
