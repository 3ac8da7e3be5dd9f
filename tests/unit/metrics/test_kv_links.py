"""Tests of KV speeds between pairs of workers: learned from transfers, compared and alerted."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from libs.cli.status.show import ListedLink, links_table
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import KvTransfer
from libs.policy.alerts.watch import SOUND, link_conditions
from libs.policy.kv_links import (
    LEAST_BYTES,
    LEAST_STEPS,
    LEAST_TRANSFERS,
    LINK_KEPT_NS,
    KvLink,
    MovedKv,
    judge,
)
from libs.policy.verdict.state import Grade
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.nodes import FRESH_NS, MAX_LINKS, CpuWaits, KvLinks, Peer
from libs.telemetry.steps import PhaseTime
from libs.testing.workers.telemetry import at, step, step_batch

MB = 1 << 20
MS = 1_000_000


def moved(link: KvLink, times: int, size_bytes: int, duration_ns: int, *, step_ns: int = 0) -> KvLink:
    for _ in range(times):
        link = link.moved(MovedKv(size_bytes, at(0), at(0) + duration_ns, link.shared_memory, step_ns))
    return link


def link(gb_per_s: float, source: str = "p", target: str = "d", *, shared: bool = False, model: str = "m") -> KvLink:
    return moved(KvLink(source, target, shared, model), LEAST_TRANSFERS, 100 * MB, round(100 * MB / gb_per_s))


def test_a_pairs_speed_is_that_of_its_fastest_transfers_and_decays_slowly() -> None:
    found = link(10.0)
    waited = moved(found, 1, 100 * MB, 10**9)
    assert found.gb_per_s is not None and waited.gb_per_s is not None
    assert abs(found.gb_per_s - 10.0) < 0.01 and waited.gb_per_s > 9.7
    assert (moved(waited, 300, 100 * MB, 10**9).gb_per_s or 0) < 0.2
    assert moved(waited, 1, 200 * MB, 10 * MS).gb_per_s == 200 * MB / (10 * MS)


def test_small_transfers_are_counted_and_do_not_affect_the_speed() -> None:
    found = moved(KvLink("p", "d", False), 5, LEAST_BYTES - 1, 1)
    assert (found.total_bytes, found.transfers, found.gb_per_s) == (5 * (LEAST_BYTES - 1), 0, None)


def test_a_pair_that_changes_its_route_starts_anew() -> None:
    found = link(10.0, shared=True).moved(MovedKv(100 * MB, at(0), at(100)))
    assert (found.gb_per_s, found.transfers, found.shared_memory) == (100 * MB / (100 * MS), 1, False)


def test_a_small_transfer_by_another_route_does_not_affect_the_speed() -> None:
    known = link(10.0, shared=True)
    small = known.moved(MovedKv(LEAST_BYTES - 1, at(0), at(1)))
    assert (small.shared_memory, small.gb_per_s, small.transfers) == (True, known.gb_per_s, LEAST_TRANSFERS)


def test_an_old_speed_and_an_idle_pair_are_forgotten() -> None:
    known = link(10.0)
    kept_ns = known.measured_unix_ns + LINK_KEPT_NS
    assert known.at(kept_ns - 1) == known
    assert known.at(kept_ns) is None
    small = known.moved(MovedKv(1, at(0), kept_ns)).at(kept_ns)
    assert small is not None and (small.gb_per_s, small.transfers) == (None, 0)
    again = known.moved(MovedKv(100 * MB, kept_ns, kept_ns + 100 * MS))
    assert (again.gb_per_s, again.transfers) == (100 * MB / (100 * MS), 1)


def test_a_pair_within_a_node_is_not_compared_with_one_between_nodes() -> None:
    near, far = replace(link(200), one_node=True), link(12, "p", "e")
    assert [each.share for each in judge([near, far])] == [1.0, 1.0]
    slow = replace(link(20, "q", "d"), one_node=True)
    (found,) = link_conditions([near, far, slow])
    assert "q to d at 20 GB/s; others within a node reach 200" in found.reason


def test_a_speed_limited_by_the_receivers_steps_is_a_lower_bound_and_never_called_slow() -> None:
    steps = moved(KvLink("p", "d", False, "m"), LEAST_TRANSFERS, 50 * MB, 20 * MS, step_ns=20 * MS)
    assert steps.is_floor and steps.gb_per_s == 50 * MB / (20 * MS)
    fast, slow = link(12, "p", "e"), moved(KvLink("p", "f", False, "m"), LEAST_TRANSFERS, 50 * MB, 200 * MS, step_ns=MS)
    assert [each.link.target for each in judge([steps, fast])] == ["e"]
    assert [(each.link.target, each.fastest_gb_per_s) for each in judge([steps, slow])] == [("f", steps.gb_per_s)]
    waited = moved(steps, 1, 50 * MB, LEAST_STEPS * 20 * MS, step_ns=20 * MS)
    assert waited.is_floor, "its speed is still the one that a step may have made"


def test_a_pair_is_compared_only_with_pairs_of_its_model_and_route() -> None:
    links = [link(12), link(3, "p", "e"), link(40, "p", "f", shared=True), link(5, "q", "g", model="other")]
    assert [(each.link.target, round(each.share, 2)) for each in judge(links)] == [
        ("e", 0.25), ("d", 1.0), ("f", 1.0), ("g", 1.0),
    ]  # fmt: skip


def test_without_a_fast_link_none_is_slow() -> None:
    assert list(link_conditions([link(0.5), link(0.01, "p", "e")])) == []


def test_a_link_far_below_the_others_fires_with_both_ends_and_figures() -> None:
    (found,) = link_conditions([link(12), link(0.4, "p", "e"), link(11, "q", "e")])
    assert (found.grade, found.labels, found.command) == (Grade.FIRE, (("model", "m"),), "fulcrum doctor")
    assert found.reason == "slow KV link: p to e at 0.4 GB/s; others by the network reach 12 GB/s"


def test_an_alert_is_unchanged_between_the_slow_and_sound_thresholds() -> None:
    grades = [
        next(link_conditions([link(12), link(speed, "p", "e")])).grade for speed in (3.9, 4.1, 5.9, 6.1)
    ]  # fmt: skip
    assert grades == [Grade.FIRE, Grade.HOLD, Grade.HOLD, Grade.CLEAR]
    assert next(link_conditions([link(12)])).reason == SOUND


def transfer(source: str, size_bytes: int = MB, ms: int = 1, *, start_ms: int = 0) -> KvTransfer:
    start_ns = at(start_ms)
    return KvTransfer(from_worker_id=source, bytes=size_bytes, start_unix_ns=start_ns, end_unix_ns=start_ns + ms * MS)


def peers(*names: str, incarnation: int = 1, node: str = "") -> dict[str, Peer]:
    return {name: Peer("m", node, incarnation) for name in names}


def test_receivers_reports_create_links_between_present_workers() -> None:
    links = KvLinks()
    batch = step_batch(1, (0, 100), [], worker="d")
    batch.kv_transfers.extend([transfer("p"), transfer("p", ms=2, start_ms=1), transfer("gone")])
    links.note(batch)
    (found,) = links.among(peers("p", "d"), at(100))
    assert (found.source, found.target, found.model) == ("p", "d", "m")
    assert (found.transfers, found.total_bytes) == (2, 2 * MB)
    assert found.gb_per_s == MB / MS / 1.02


def test_named_blocks_that_came_in_parts_leave_a_links_speed_as_it_was() -> None:
    links = KvLinks()
    batch = step_batch(1, (0, 100), [], worker="d")
    batch.chunk_tokens = 4_096
    for ms, ready_ms in ((1, 1), (90, 2)):
        pulled = transfer("p", ms=ms)
        pulled.prompt_tokens, pulled.ready_ns, pulled.named = 1_000, ready_ms * MS, True
        batch.kv_transfers.append(pulled)
    links.note(batch)
    (found,) = links.among(peers("p", "d"), at(100))
    assert (found.transfers, found.gb_per_s, found.is_floor) == (1, MB / MS, False)


def test_named_blocks_of_a_sender_that_did_not_measure_its_wait_leave_a_links_speed_as_it_was() -> None:
    links = KvLinks()
    batch = step_batch(1, (0, 100), [], worker="d")
    batch.chunk_tokens = 4_096
    for ms, ready_ms in ((1, 1), (90, 0)):
        pulled = transfer("p", ms=ms)
        pulled.prompt_tokens, pulled.ready_ns, pulled.named = 1_000, ready_ms * MS, True
        batch.kv_transfers.append(pulled)
    links.note(batch)
    (found,) = links.among(peers("p", "d"), at(100))
    assert (found.transfers, found.gb_per_s) == (1, MB / MS)


def test_links_are_bounded_and_the_longest_idle_is_dropped() -> None:
    links = KvLinks()
    for number in range(MAX_LINKS + 1):
        batch = step_batch(1, (0, 100), [], worker="d")
        batch.kv_transfers.append(transfer(f"p{number}"))
        links.note(batch)
    assert links.among(peers("p0", "d"), at(100)) == []
    assert len(links.among(peers("p1", "d"), at(100))) == 1


def test_a_pair_without_recent_transfers_is_omitted() -> None:
    links = KvLinks()
    batch = step_batch(1, (0, 100), [], worker="d")
    batch.kv_transfers.append(transfer("p"))
    links.note(batch)
    assert len(links.among(peers("p", "d", node="n"), at(1))) == 1
    assert links.among(peers("p", "d"), at(1) + LINK_KEPT_NS) == []


def test_only_steps_of_vllm_lengthen_a_transfer() -> None:
    links = KvLinks()
    for engine, receiver in (("vllm", "v"), ("vllm", "idle"), ("torch", "t")):
        steps = [] if receiver == "idle" else [step(0, 40, decode=1), step(40, 50, decode=1)]
        batch = step_batch(1, (0, 100), steps, worker=receiver)
        batch.engine = engine
        batch.kv_transfers.append(transfer("p", ms=50))
        links.note(batch)
    found = links.among(peers("p", "v", "idle", "t"), at(100))
    assert {each.target: each.is_floor for each in found} == {"v": True, "idle": False, "t": False}


@pytest.mark.parametrize("short", ["p", "d"])
def test_transfers_while_either_end_waits_for_a_cpu_never_make_a_link_slow(short: str) -> None:
    def alert(cpu_wait: float | None) -> Grade | None:
        fleet = FleetTelemetry(lambda _batch: [], lambda *_: PhaseTime())
        for number in range(20):
            cover_ms = (100 * number, 100 * number + 100)
            for name in ("p", "q", "d"):
                batch = step_batch(number + 1, cover_ms, [], worker=name)
                if name == short and cpu_wait is not None:
                    batch.sched_delay_ns = round(cpu_wait * 100 * MS)
                if name == "d":
                    batch.kv_transfers.extend(
                        [transfer(name, 20 * MB, ms, start_ms=cover_ms[0]) for name, ms in (("p", 90), ("q", 2))]
                    )
                fleet.add(batch, at(cover_ms[1]))
        return next((each.grade for each in link_conditions(fleet.kv_links(at(2_000)))), None)

    assert alert(None) is Grade.FIRE, "nothing is reported"
    assert alert(0.02) is Grade.FIRE, "its cores are idle"
    assert alert(0.4) is not Grade.FIRE


def test_a_fast_link_stays_fast_while_cores_are_short() -> None:
    found = link(10.0)
    slow = MovedKv(100 * MB, at(0), at(1_000), short_of_cpu=True)
    for _ in range(100):
        found = found.moved(slow)
    assert (found.is_floor, round(found.gb_per_s or 0.0, 1)) == (False, 10.0)
    assert (moved(found, 300, 100 * MB, 10**9).gb_per_s or 0.0) < 0.2


def test_a_speed_measured_while_cores_were_short_is_a_lower_bound_until_the_next_measurement() -> None:
    slow = KvLink("p", "d", False, "m")
    for _ in range(LEAST_TRANSFERS):
        slow = slow.moved(MovedKv(100 * MB, at(0), at(1_000), short_of_cpu=True))
    assert slow.is_floor
    assert not moved(slow, LEAST_TRANSFERS, 100 * MB, 10**9).is_floor


def test_the_mean_wait_for_a_cpu_rises_quickly_and_falls_within_seconds() -> None:
    waits = CpuWaits()

    def report(number: int, share: float) -> float:
        batch = step_batch(number + 1, (100 * number, 100 * number + 100), [], worker="d")
        batch.sched_delay_ns = round(share * 100 * MS)
        waits.note(batch)
        return waits.share("d", at(100 * number + 100)) or 0.0

    assert waits.share("d", at(0)) is None
    rising = [report(number, 0.5) for number in range(10)]
    assert rising[0] < 0.15 and rising[3] > 0.25
    falling = [report(number, 0.0) for number in range(10, 50)]
    assert falling[3] > 0.25 and falling[39] < 0.15
    assert report(10, 1.0) == falling[39], "a late batch changes nothing"
    assert report(60, 5.0) <= 1.0
    assert waits.share("d", at(6_100) + FRESH_NS) is None


def test_a_pair_starts_anew_after_a_restart_of_either_process() -> None:
    fleet = FleetTelemetry(lambda _batch: [], lambda *_: PhaseTime())

    def links(covered_ms: int, *, source: int, target: int) -> list[int]:
        for name, incarnation in (("p", source), ("d", target)):
            sequence, cover_ms = covered_ms + 1, (covered_ms, covered_ms + 100)
            batch = step_batch(sequence, cover_ms, [], worker=name, incarnation=incarnation)
            if name == "d":
                batch.kv_transfers.append(transfer("p"))
            fleet.add(batch, at(covered_ms + 100))
        return [each.transfers for each in fleet.kv_links(at(covered_ms + 100))]

    assert links(0, source=1, target=1) == [1]
    assert links(100, source=1, target=2) == [1]
    assert links(200, source=1, target=2) == [2]
    assert links(300, source=2, target=2) == [1]
    late = step_batch(9, (0, 100), [], worker="d", incarnation=1)
    late.kv_transfers.append(transfer("p"))
    fleet.add_late_transfers(late)
    assert [each.transfers for each in fleet.kv_links(at(400))] == [1], "of a process that has been replaced"
    fleet.add(step_batch(1, (400, 500), [], worker="p", incarnation=3), at(500))
    assert fleet.kv_links(at(500)) == [], "what came from the one before says nothing of the next"


def test_the_command_prints_each_pair_and_leaves_unknown_figures_empty() -> None:
    rows = [
        ListedLink("p", "e", "m", "network", 9, 2_500_000_000, 0.4, 0.03),
        ListedLink("q", "e", "m", "shared_memory", 0, 1_000_000, None, None),
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(links_table(rows))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[1:] == [
        ["p", "e", "network", "9", "2.50", "0.40", "3%"],
        ["q", "e", "shared", "memory", "0", "0.00", "-", "-"],
    ]


def test_kv_that_arrives_while_its_long_prompt_is_computed_does_not_make_the_link_slow() -> None:
    def links_after(prompt_tokens: int, ready_ms: int) -> list[KvLink]:
        links = KvLinks()
        for number in range(LEAST_TRANSFERS):
            batch = step_batch(1, (0, 100), [], worker="d")
            batch.chunk_tokens = 512
            moving = transfer("p", 400 * MB, ms=1_400, start_ms=1_400 * number)
            moving.prompt_tokens, moving.ready_ns = prompt_tokens, ready_ms * MS
            batch.kv_transfers.append(moving)
            links.note(batch)
        return links.among(peers("p", "d"), at(1_500))

    fast = link(12, "p", "e")
    for prompt_tokens, ready_ms, grade in ((1_200, 90, Grade.CLEAR), (1_200, 1_300, Grade.FIRE), (500, 90, Grade.FIRE)):
        (condition,) = link_conditions([fast, *links_after(prompt_tokens, ready_ms)])
        assert condition.grade is grade, (prompt_tokens, ready_ms)
    (unreported,) = links_after(1_200, 0)
    assert not unreported.is_floor


def test_transfers_that_share_a_link_count_with_the_speed_of_the_link() -> None:
    """A role move hands sequences over at once; 14 of them once made a sound link a thirteenth as fast."""
    links, count = KvLinks(), 2 * LEAST_TRANSFERS
    batch = step_batch(1, (0, 100), [], worker="d")
    batch.kv_transfers.extend([transfer("p", 100 * MB, ms=25 * count) for _ in range(count)])
    links.note(batch)
    (found,) = links.among(peers("p", "d"), at(1_000))
    assert found.gb_per_s == pytest.approx(100 * MB / (25 * MS))
    assert found.total_bytes == count * 100 * MB
    (condition,) = link_conditions([link(4.2, "p", "e"), found])
    assert condition.grade is Grade.CLEAR
