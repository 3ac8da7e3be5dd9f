"""Tests of the planner's snapshot of the registry and telemetry."""

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    ROLE_MIXED,
    ROLE_PREFILL,
    ROLE_UNSPECIFIED,
    Load,
)
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    MODE_ADVISORY,
)
from libs.policy.roles import Role
from libs.telemetry.fleet_loads import MOST_COUNTED
from libs.testing.workers.telemetry import MS, Telling, at
from services.planner.messages import summary
from services.planner.state import Identity, PlannerState
from tests.unit.planner.snapshot_rig import WINDOW_MS, busy_batch, worker


def state_of(*workers, mode=MODE_ADVISORY, kept_decisions=5):
    state = PlannerState(
        Identity("planner-0", at(0), mode), lag_ns=0, window_ns=WINDOW_MS * MS, kept_decisions=kept_decisions
    )
    state.take_workers(workers, at(0))
    return state


def snapshot_of(*workers_and_busy):
    state = state_of(*(registered for registered, _ in workers_and_busy))
    batches = [busy_batch(registered, busy_ms) for registered, busy_ms in workers_and_busy if busy_ms is not None]
    state.take_loads(Telling().loads(batches, at(WINDOW_MS)), at(WINDOW_MS))
    return state.snapshot(at(WINDOW_MS))


def test_mixed_workers_belong_to_the_decode_pool_and_models_have_separate_pools():
    snapshot = snapshot_of(
        (worker("d", "decode"), 100), (worker("m", "mixed"), 300), (worker("x", "decode", model="other"), 900)
    )
    assert [(pool.model, pool.workers, pool.busy) for pool in snapshot.pools] == [
        ("other", 1, 0.9),
        ("sim", 2, 0.2),
    ]


def test_telemetry_of_an_older_incarnation_is_ignored():
    restarted = worker("d", "decode", incarnation=2)
    state = state_of(restarted)
    before = busy_batch(restarted, 500, load=Load(running=5), incarnation=1)
    state.take_loads(Telling().loads([before], at(WINDOW_MS)), at(WINDOW_MS))
    (pool,) = state.snapshot(at(WINDOW_MS)).pools
    assert (pool.busy, pool.coverage, pool.running) == (None, 0, 0)


def test_a_worker_without_a_role_is_in_a_pool_of_its_own():
    odd = worker("x", "prefill")
    odd.assignment.role = ROLE_UNSPECIFIED
    snapshot = snapshot_of((odd, 100), (worker("p", "prefill"), 500), (worker("d", "decode"), 100))
    assert [pool.role for pool in snapshot.pools] == [None, Role.PREFILL, Role.MIXED]
    pools = summary(snapshot).pools
    assert [pool.role for pool in pools] == [ROLE_UNSPECIFIED, ROLE_PREFILL, ROLE_MIXED]


def test_sums_beyond_the_range_of_a_decision_are_clamped():
    most = 2**32 - 1
    workers = [worker(name, "decode", gpus=most) for name in ("a", "b")]
    state, telling = state_of(*workers), Telling()
    batches = []
    for each in workers:
        load = Load(running=most, waiting=most, waiting_prefill_tokens=2**64 - 1)
        batches.append(busy_batch(each, 100, load=load))
    state.take_loads(telling.loads(batches, at(WINDOW_MS)), at(WINDOW_MS))
    (pool,) = state.decide(at(WINDOW_MS)).decisions[0].inputs.pools
    assert (pool.gpus, pool.running, pool.waiting) == (most, most, most)
    assert pool.waiting_prefill_tokens == 2 * MOST_COUNTED


def test_more_prompts_waiting_at_workers_are_news_and_fewer_are_not():
    registered = worker("p", "prefill")
    state, telling = state_of(registered), Telling()

    def waits(tokens, sent_ms):
        batch = busy_batch(registered, 500, load=Load(waiting=1, waiting_prefill_tokens=tokens))
        batch.sequence, batch.covered_to_unix_ns = sent_ms, at(sent_ms)
        return state.take_loads(telling.loads([batch], at(sent_ms)), at(sent_ms))

    assert [waits(100, 1000), waits(100, 1100), waits(300, 1200), waits(0, 1300)] == [True, False, True, False]
