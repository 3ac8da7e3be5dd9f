"""Tests of forward-pass metrics of Dynamo's workers: decoded, refused and converted."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import InvalidRequest
from libs.contracts.step_row import step_rows
from libs.observe.dynamo import PassRecord, PublishedRecord, parse_card, parse_channel, parse_message
from libs.observe.dynamo_steps import DynamoEngine, RecordCounts
from tests.dynamo_rig import NOW_MS, WORKER, card, channel, message, record


def parsed_card(role="prefill", ranks=1):
    found = parse_card(msgspec.json.encode(card(role, ranks)))
    assert found is not None
    return found


def engine(role="prefill", counts=None):
    return DynamoEngine(parsed_card(role), 0, "node", NOW_MS * 10**6, counts or RecordCounts())


def taken(found, *records):
    """Enter (record, published at, sequence), and return all batches."""
    batches = []
    for body, at_ms, *sequence in records:
        batches += found.take(*parse_message(message(body, at_ms, *sequence)))
    return batches + found.cut()


def rows(batches):
    return [row for batch in batches for row in step_rows(batch.steps)]


@given(st.lists(st.binary(max_size=600), max_size=4))
def test_bytes_that_are_not_a_record_are_refused(parts):
    with pytest.raises(InvalidRequest):
        parse_message(parts)


@given(st.data())
def test_a_damaged_message_is_refused_or_still_valid(data):
    parts = message(record(sum_prefill_tokens=1500, num_prefill_requests=1))
    found = bytearray(parts[-1])
    found[data.draw(st.integers(0, len(found) - 1))] = data.draw(st.integers(0, 255))
    try:
        envelope, got = parse_message([*parts[:-1], bytes(found)])
    except InvalidRequest:
        return
    assert isinstance(envelope, PublishedRecord) and isinstance(got, PassRecord)
    assert 0 <= got.wall_time <= 600


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2}, {"worker_id": 5}, {"worker_id": "a\nb"}, {"dp_rank": -1}, {"counter_id": "1"},
        {"wall_time": float("nan")}, {"wall_time": -1.0}, {"wall_time": float("inf")}, {"scheduled_requests": []},
        {"scheduled_requests": {"sum_prefill_tokens": -1}},
    ],
)  # fmt: skip
def test_a_record_of_another_version_or_type_is_refused(wrong):
    with pytest.raises(InvalidRequest):
        parse_message(message({**record(), **wrong, "counter_id": wrong.get("counter_id", 1)}))


def test_an_envelope_of_another_version_is_refused():
    with pytest.raises(InvalidRequest, match="version 2"):
        parse_message(message(record(), version=2))


def test_a_heartbeat_covers_idle_time_without_a_step():
    batches = taken(engine(), (record(1, 0.0), NOW_MS), (record(2, 0.0), NOW_MS + 1000))
    assert rows(batches) == []
    assert sum(each.covered_to_unix_ns - each.covered_from_unix_ns for each in batches) == 10**9


def test_time_in_which_records_were_lost_is_not_covered():
    counts = RecordCounts()
    batches = taken(
        engine(counts=counts),
        (record(1, 0.0), NOW_MS), (record(2, 0.0), NOW_MS + 1000), (record(9, 0.01), NOW_MS + 1500),
    )  # fmt: skip
    assert [(each.covered_from_unix_ns - NOW_MS * 10**6) // 10**6 for each in batches] == [0, 1490]
    assert counts.lost == 6


def test_a_counter_that_starts_over_is_a_restart_and_a_repeated_record_is_stale():
    counts = RecordCounts()
    taken(
        engine(counts=counts),
        (record(8), NOW_MS, 8), (record(8), NOW_MS, 8), (record(1), NOW_MS + 900, 9), (record(2), NOW_MS + 950, 10),
    )  # fmt: skip
    assert (counts.restarts, counts.stale, counts.lost, counts.taken) == (1, 1, 0, 3)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=50))
def test_steps_that_follow_each_other_keep_their_lengths(lengths_ms):
    # The end is published in whole milliseconds, the length is exact.
    found, at_us = engine(), NOW_MS * 1000
    records = []
    for number, length in enumerate(lengths_ms, 1):
        at_us += length * 1000 + 300
        records.append((record(number, length / 1000 + 0.0003), at_us // 1000))
    batches = taken(found, *records)
    got = rows(batches)
    assert len(got) == len(lengths_ms)
    assert sum(row.end_unix_ns - row.start_unix_ns for row in got) == pytest.approx(
        sum(lengths_ms) * 10**6 + 300_000 * len(lengths_ms), abs=1000
    )
    assert all(one.end_unix_ns <= two.start_unix_ns for one, two in pairwise(got))


def test_transferred_prompts_of_a_decode_worker_do_not_count_as_prefill():
    work = {"num_prefill_requests": 1, "sum_prefill_tokens": 1500, "num_decode_requests": 3, "sum_decode_kv_tokens": 9}
    (row,) = rows(taken(engine("decode"), (record(1, **work), NOW_MS)))
    assert (row.prefill_tokens, row.decode_sequences, row.decode_kv_tokens) == (0, 4, 1509)
    (row,) = rows(taken(engine("aggregated"), (record(1, **work), NOW_MS)))
    assert (row.prefill_tokens, row.decode_sequences) == (1500, 3)


def test_ranks_become_engines_of_a_group():
    found = DynamoEngine(parsed_card(ranks=2), 1, "node", 1, RecordCounts())
    (batch,) = taken(found, (record(1), NOW_MS))
    assert batch.worker_id == f"prefill-{WORKER:x}-dp1"
    assert batch.group == f"prefill-{WORKER:x}"


def test_only_channels_of_forward_pass_metrics_over_zeromq_are_followed():
    good = channel()
    assert parse_channel(msgspec.json.encode(good)) is not None
    assert parse_channel(msgspec.json.encode({**good, "topic": "kv_metrics"})) is None
    assert parse_channel(msgspec.json.encode({**good, "transport": {**good["transport"], "kind": "Nats"}})) is None
    for endpoint in ("ipc:///tmp/a", "tcp://", "tcp://host", "tcp://host:port", "tcp://host:99999", "tcp://a\nb:1"):
        assert parse_channel(msgspec.json.encode(channel(endpoint))) is None, endpoint
    assert parse_channel(b"{") is None
