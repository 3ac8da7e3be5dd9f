"""Properties of the cached list of workers and their loads, against what each reported last."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import SharedWorker
from libs.telemetry.columns import prefill_shares
from libs.telemetry.directory import LISTED_NS
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.timeline import MAX_NEW, Timeline
from libs.telemetry.workers import LOAD_NS, MOST_COUNTED, RELIST_NS, listed_of
from libs.testing.workers.telemetry import MS, at, step, step_batch

COUNTS = ("running", "waiting", "waiting_prefill_tokens", "awaiting_kv", "free_kv_blocks")
loads = st.builds(Load, **dict.fromkeys(COUNTS, st.integers(0, 2**32 - 1)))
events = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["on"] * 5 + ["role", "model", "gpus", "places", "again", "leave", "relay", "relay"]),
    loads,
    st.sampled_from([0, 0, 0, 1, LOAD_NS // MS, LISTED_NS // MS]),
)


class Cluster:
    """Workers that send 100 ms at a time; events change what each reports."""

    def __init__(self):
        self.fleet, self.now_ms = FleetTelemetry(prefill_shares), 0
        self.said = {name: {"role": "decode", "model": "m", "gpus": 1, "incarnation": 1} for name in "abc"}
        self.places = dict.fromkeys("abc", 8)

    def happen(self, worker, kind, load, silent_ms):
        self.now_ms += 100 + silent_ms
        said = self.said[worker]
        said |= {
            "role": {"role": {"role": "prefill" if said["role"] == "decode" else "decode"}},
            "model": {"model": {"model": said["model"] + "m"}},
            "gpus": {"gpus": {"gpus": said["gpus"] + 1, "incarnation": said["incarnation"] + 1}},
            "again": {"again": {"incarnation": said["incarnation"] + 1}},
        }.get(kind, {}).get(kind, {})  # fmt: skip
        self.places[worker] += kind == "places"
        cover = (self.now_ms - 100, self.now_ms)
        batch = step_batch(self.now_ms, cover, [step(cover[0], cover[1] - 1)], worker=worker, load=load, **said)
        batch.max_sequences, batch.kv_blocks, batch.last = self.places[worker], 1000, kind == "leave"
        if kind == "relay":
            self.fleet.relay(SharedWorker(newest=batch), at(self.now_ms), at(self.now_ms), "other")
        else:
            self.fleet.add(batch, at(self.now_ms))


def reported_again(roll, now_ns):
    """Return the list made from the newest reports of all workers."""
    by_id = {facts.worker_id: facts for facts in roll.known()}
    received = [by_id[facts.worker_id] for facts in roll.listed(now_ns)]
    return [
        listed_of(each, own=roll.is_own(each.worker_id), reader=roll.reader(each.worker_id) or "") for each in received
    ]


@given(st.lists(events, max_size=25))
def test_the_list_shows_new_reports_at_once_and_silence_within_its_time(happened):
    cluster = Cluster()
    for event in happened:
        cluster.happen(*event)
        now_ns, roll = at(cluster.now_ms), cluster.fleet.directory
        listed = {each.worker_id: each for each in roll.listing(now_ns).workers}
        anew = {each.worker_id: each for each in reported_again(roll, now_ns)}
        # Who has fallen silent, or left, since the list was made may still be on it.
        assert listed == {name: anew.get(name, each) for name, each in listed.items()}
        assert anew.keys() <= listed.keys()
        cluster.now_ms += RELIST_NS // MS
        now_ns = at(cluster.now_ms)
        late = roll.listing(now_ns)
        assert list(late.workers) == reported_again(roll, now_ns)
        assert roll.listing(now_ns) is late


@given(st.lists(events, max_size=25))
def test_loads_are_the_last_reported_ones_without_silent_workers(happened):
    cluster = Cluster()
    for event in happened:
        cluster.happen(*event)
        now_ns, roll = at(cluster.now_ms), cluster.fleet.directory
        found = roll.loads(now_ns)
        by_id = {facts.worker_id: facts for facts in roll.known()}
        for place, name in enumerate(found.listing.ids):
            facts = by_id[name]
            received = facts.covered_to_unix_ns > now_ns - LOAD_NS
            expected = [getattr(facts.load, count) * received for count in COUNTS]
            assert [int(getattr(found, count)[place]) for count in COUNTS] == expected
            assert (bool(found.reporting[place]), int(found.covered_to_ns[place])) == (
                received,
                facts.covered_to_unix_ns,
            )


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_list_and_extreme_loads_are_handled(workers):
    fleet = FleetTelemetry(prefill_shares)
    most = Load(running=2**32 - 1, waiting_prefill_tokens=2**64 - 1)
    for batch in [step_batch(1, (0, 100), load=most)] * workers:
        fleet.add(batch, at(100))
    found = fleet.directory.loads(at(100))
    assert found.waiting_prefill_tokens.tolist() == [MOST_COUNTED] * workers
    assert found.running.tolist() == [2**32 - 1] * workers


def test_workers_first_seen_together_do_their_bookkeeping_at_different_times(monkeypatch):
    count, taken_in = 4 * MAX_NEW, Counter()
    inner = Timeline._take_in

    def take_in(timeline):
        taken_in[tick] += bool(timeline._new)
        inner(timeline)

    monkeypatch.setattr(Timeline, "_take_in", take_in)
    fleet = FleetTelemetry(prefill_shares)
    for tick in range(4 * MAX_NEW):
        cover = (100 * tick, 100 * tick + 100)
        for number in range(count):
            batch = step_batch(tick, cover, [step(cover[0] + 1, cover[1] - 1)], worker=f"decode-{number}")
            fleet.add(batch, at(cover[1]))
        fleet.settle()
        if tick == 2 * MAX_NEW:  # somebody reads all of them
            for number in range(count):
                fleet.phases(f"decode-{number}", at(0), at(cover[1]))
    steady = [taken_in[tick] for tick in range(1, 4 * MAX_NEW) if tick != 2 * MAX_NEW]
    assert max(steady) <= count // MAX_NEW
