"""Waits for a CPU from batches that are gathered, against those from each batch by itself."""

import pytest

from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.nodes import CpuWaits
from libs.testing.workers.telemetry import MS, at, step, step_batch


@pytest.mark.parametrize("waits_ms", [(50, 0, 90, 20), (50, None, 0, 70), (200, 0, 0, 0), (0, 0, 0, 0)])
def test_gathered_batches_bring_the_waits_that_each_brings_by_itself(waits_ms):
    fleet, alone = FleetTelemetry(prefill_shares), CpuWaits()
    for number, wait_ms in enumerate(waits_ms):
        batch = step_batch(number + 1, (100 * number, 100 * number + 100), [step(100 * number + 10, 100 * number + 40)])
        if wait_ms is not None:
            batch.sched_delay_ns = wait_ms * MS
            alone.note(batch)
        fleet.add(batch, at(100 * number + 110))
    fleet.settle()
    assert fleet.cpu_waits.share("decode-0", at(400)) == alone.share("decode-0", at(400)) is not None


def test_workers_that_report_no_waits_have_none():
    fleet = FleetTelemetry(prefill_shares)
    for number in range(3):
        fleet.add(step_batch(number + 1, (100 * number, 100 * number + 100)), at(100 * number + 110))
    fleet.settle()
    assert fleet.cpu_waits.share("decode-0", at(300)) is None
    assert len(fleet.cpu_waits) == 0
