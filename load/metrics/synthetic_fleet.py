"""The step telemetry of many synthetic GPUs, which send a batch ten times a second at different phases."""

import argparse
import contextlib
import random
import sys
import time
from array import array
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Compute, Load, StepTime
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.roles import role_from_name
from libs.contracts.step_row import StepRow, step_columns

PERIOD_NS: Final = 100_000_000
WORKERS_PER_NODE: Final = 8
# The time from sending a batch to its arrival. Kafka takes some milliseconds. The embedded broker, which is polled
# every 40 ms, takes up to 45.
ARRIVAL_NS: Final = 30_000_000
# Batches that are due within this time are sent together.
SLICE_NS: Final = 5_000_000
DECODE_STEP_NS: Final = 20_000_000
PREFILL_STEP_NS: Final = 50_000_000
# Workers on Linux report a delay with every batch.
SCHED_DELAY_NS: Final = 100_000
PREFILL_SHARE: Final = 0.3
_STEP_TIME: Final = StepTime(
    prefill_floor_ns=5e6, prefill_fixed_ns=2e6, prefill_token_ns=2e4, decode_fixed_ns=8e6, decode_sequence_ns=1e5,
    decode_kv_token_ns=10, interference=0.9,
)  # fmt: skip
_COMPUTE: Final = Compute(
    layer_parameters=7 * 10**9, head_parameters=5 * 10**8, parameter_bytes=2, attention_width=131_072,
    kv_token_bytes=131_072, peak_flops_per_s=989e12, peak_bytes_per_s=3.35e12,
)  # fmt: skip


class SyntheticWorker:
    """A worker with one GPU.

    Its message is built once and then only gets new times, so that generating it costs little.
    """

    def __init__(self, number: int, *, prefill: bool, busy: float, phase_ns: int, running: float) -> None:
        """Create a worker that sends a batch `phase_ns` into each 100 ms.

        A step has then run for the fraction `running` of its time, and the batch covers the time before this step.
        """
        self.phase_ns = phase_ns
        role, budget = role_from_name("prefill" if prefill else "decode")
        step_ns = PREFILL_STEP_NS if prefill else DECODE_STEP_NS
        self._held_ns = int(running * step_ns)
        ends_ns = range(phase_ns - self._held_ns, phase_ns - self._held_ns - PERIOD_NS, -step_ns)
        self.step_ends_ns = sorted(end_ns % PERIOD_NS or PERIOD_NS for end_ns in ends_ns)
        """The ends of steps in each 100 ms, in (0, `PERIOD_NS`]."""
        step = StepRow(
            1, prefill_tokens=1024 * prefill, prefill_sequences=int(prefill), prefill_context_tokens=1024 * prefill,
            decode_sequences=0 if prefill else 16, decode_kv_tokens=0 if prefill else 16_000,
        )  # fmt: skip
        self._spans_ns = [
            (back_ns + int(busy * step_ns), back_ns) for back_ns in range(PERIOD_NS - step_ns, -1, -step_ns)
        ]
        steps = len(self._spans_ns)
        self._batch = StepBatch(
            worker_id=f"worker-{number:04}", incarnation=1, node=f"node-{number // WORKERS_PER_NODE:03}", gpus=1,
            engine="sim", assignment=Assignment(model=f"model-{number % 3}", role=role, budget_tokens=budget, epoch=1),
            load=Load(running=8, waiting=2, waiting_prefill_tokens=512), steps=step_columns([step] * steps),
            step_time=_STEP_TIME, compute=_COMPUTE, description=1, sched_delay_ns=SCHED_DELAY_NS,
        )  # fmt: skip

    @property
    def id(self) -> str:
        return self._batch.worker_id

    def batch(self, sent_ns: int) -> bytes:
        """Return the batch sent at `sent_ns`, serialised. It covers 100 ms that end with the latest finished step."""
        batch, end_ns = self._batch, sent_ns - self._held_ns
        batch.sequence += 1
        batch.covered_from_unix_ns, batch.covered_to_unix_ns = end_ns - PERIOD_NS, end_ns
        batch.steps.start_unix_ns = array("q", [end_ns - start_ns for start_ns, _ in self._spans_ns]).tobytes()
        batch.steps.end_unix_ns = array("q", [end_ns - back_ns for _, back_ns in self._spans_ns]).tobytes()
        return batch.SerializeToString()


def synthetic_fleet(gpus: int) -> list[SyntheticWorker]:
    """Return `gpus` workers, in the order of the phase at which they send."""
    chance = random.Random(1)
    workers = [
        SyntheticWorker(
            number,
            prefill=chance.random() < PREFILL_SHARE,
            busy=chance.uniform(0.2, 0.98),
            phase_ns=chance.randrange(PERIOD_NS),
            running=chance.random(),
        )
        for number in range(gpus)
    ]
    return sorted(workers, key=lambda worker: worker.phase_ns)


def send_forever(gpus: int, number: int = 0, of: int = 1) -> None:
    """Write a fleet's batches to stdout at their times of arrival, each after its length in 4 bytes.

    Of all workers every `of`-th is written, starting with the `number`-th.
    """
    fleet, out = synthetic_fleet(gpus)[number::of], sys.stdout.buffer
    start_ns = time.time_ns() // PERIOD_NS * PERIOD_NS
    while True:
        for worker in fleet:
            sent_ns = start_ns + worker.phase_ns
            if (early_ns := sent_ns + ARRIVAL_NS - time.time_ns()) > 0:
                out.flush()
                time.sleep(max(early_ns, SLICE_NS) / 1e9)
            value = worker.batch(sent_ns)
            out.write(len(value).to_bytes(4, "little") + value)
        start_ns += PERIOD_NS


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpus", type=int)
    parser.add_argument("number", type=int, nargs="?", default=0, help="first worker that is written")
    parser.add_argument("of", type=int, nargs="?", default=1, help="step from one written worker to the next")
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        send_forever(**vars(parser.parse_args()))
