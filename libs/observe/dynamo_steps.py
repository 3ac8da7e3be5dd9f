"""The steps of one Dynamo engine, from its forward-pass metrics to telemetry. Pure; time is passed in."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, Assignment, Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.step_row import StepRow, step_columns
from libs.observe.demand import KnownWork, StepCounter
from libs.observe.dynamo import Card, PassRecord, PublishedRecord
from libs.telemetry.columns import LONGEST_NS

ENGINE: Final = "dynamo"
MAX_STEPS: Final = 16_384
"""The maximum number of steps that await a cut; beyond it all of them are dropped, and their time is unknown."""
MAX_SLIP_NS: Final = 50_000_000
"""The maximum time by which a step may be placed later than its publication, which is in whole milliseconds."""
COVERED_AT_ONCE: Final = 64
MOST_STRETCHES: Final = 64


@dataclass(slots=True)
class RecordCounts:
    taken: int = 0
    lost: int = 0
    """Records that never arrived, according to the counters."""
    stale: int = 0
    """Records that arrived twice, or after later ones."""
    restarts: int = 0
    dropped: int = 0
    """Steps dropped because too many awaited a cut."""


class DynamoEngine:
    """One engine: a worker, or one data-parallel rank of a worker."""

    def __init__(self, card: Card, rank: int, node: str, now_ns: int, counts: RecordCounts) -> None:
        self.card = card
        self._name, self._group = _names(card, rank)
        self._node = node
        self._incarnation = now_ns
        self._counts = counts
        self._counter = self._publisher = self._sent = self._published = -1
        self._covered_from_ns = self._covered_to_ns = 0
        self._end_ns = 0
        self._sequence = 0
        self._steps: list[StepRow] = []
        self._load = Load()
        self._counter_of_work = StepCounter()
        self._waiting_prompts = 0
        self.stretches: list[KnownWork] = []
        """The demand of the batches, until it is collected."""

    @property
    def name(self) -> str:
        return self._name

    def take(self, envelope: PublishedRecord, record: PassRecord) -> list[StepBatch]:
        """Enter a record, and return the batches that end where records are missing."""
        published_ns = envelope.published_at * 1_000_000
        follows = record.counter_id == self._counter + 1
        if record.counter_id <= self._counter:
            again = envelope.publisher_id == self._publisher and envelope.sequence <= self._sent
            if again or envelope.published_at <= self._published:
                self._counts.stale += 1
                return []
            self._counts.restarts += 1
        elif not follows and self._counter >= 0:
            self._counts.lost += record.counter_id - self._counter - 1
        self._counts.taken += 1
        self._counter, self._published = record.counter_id, envelope.published_at
        self._publisher, self._sent = envelope.publisher_id, envelope.sequence
        length_ns = round(record.wall_time * 1e9)
        end_ns = self._place(published_ns, length_ns)
        found: list[StepBatch] = []
        if not follows:
            found = self.cut()
            self._leave_gap(end_ns - length_ns)
        if length_ns:
            self._append(record, end_ns - length_ns, end_ns)
            budget = self.card.card_json.runtime_config.max_num_batched_tokens or 0
            self._counter_of_work.add(_work_row(record), self.card.role, budget)
        self._waiting_prompts = record.queued_requests.num_prefill_requests
        self._covered_to_ns = max(self._covered_to_ns, end_ns)
        self._load = _load(record)
        return found

    def cut(self) -> list[StepBatch]:
        """Return batches from the end of the last one to the last record."""
        from_ns, to_ns = self._covered_from_ns, self._covered_to_ns
        if to_ns <= from_ns:
            return []
        steps, self._steps = self._steps, []
        edges = [*range(from_ns, to_ns, LONGEST_NS), to_ns]
        found: list[StepBatch] = []
        begin_ns = 0  # the first piece includes steps that began before it
        for low_ns, high_ns in pairwise(edges[-COVERED_AT_ONCE:]):
            found.append(self._batch(low_ns, high_ns, [each for each in steps if begin_ns <= each[0] < high_ns]))
            begin_ns = high_ns
        self._covered_from_ns = to_ns
        work = self._counter_of_work.take(from_ns, to_ns, running=self._load.running, waiting=self._waiting_prompts)
        self.stretches = [*self.stretches[-MOST_STRETCHES:], work]
        return found

    def farewell(self, now_ns: int) -> StepBatch:
        """Return the last batch of an engine that has left."""
        low_ns = min(max(self._covered_from_ns, now_ns - LONGEST_NS), now_ns - 1)
        batch = self._batch(low_ns, now_ns, [])
        batch.last = True
        return batch

    def _place(self, published_ns: int, length_ns: int) -> int:
        """Return the end of a step, late enough that it does not overlap the previous one."""
        return min(max(published_ns, self._end_ns + length_ns), published_ns + MAX_SLIP_NS)

    def _leave_gap(self, start_ns: int) -> None:
        """Begin the cover with this step, because earlier records never arrived."""
        self._covered_from_ns = self._covered_to_ns = max(start_ns, self._covered_to_ns)

    def _append(self, record: PassRecord, start_ns: int, end_ns: int) -> None:
        if len(self._steps) >= MAX_STEPS:
            self._counts.dropped += len(self._steps)
            self._steps.clear()
            self._covered_from_ns = start_ns
        start_ns = max(start_ns, self._end_ns)
        self._end_ns = max(end_ns, start_ns + 1)
        self._steps.append(_row(record, self.card.role, start_ns, self._end_ns))

    def _batch(self, low_ns: int, high_ns: int, steps: list[StepRow]) -> StepBatch:
        self._sequence += 1
        model, role = self.card.card_json, self.card.role
        runtime = model.runtime_config
        chunk_tokens = runtime.max_num_batched_tokens or 0
        return StepBatch(
            worker_id=self._name,
            group=self._group,
            incarnation=self._incarnation,
            sequence=self._sequence,
            node=self._node,
            gpus=1,
            engine=ENGINE,
            assignment=Assignment(
                model=model.display_name,
                role=ROLE_PREFILL if role == "prefill" else ROLE_MIXED,
                budget_tokens=chunk_tokens if role == "mixed" else 0,
            ),
            covered_from_unix_ns=low_ns,
            covered_to_unix_ns=high_ns,
            steps=step_columns(steps),
            load=self._load,
            max_sequences=runtime.max_num_seqs or 0,
            chunk_tokens=chunk_tokens,
        )


def _names(card: Card, rank: int) -> tuple[str, str]:
    """Return the names of an engine and of its data-parallel group."""
    ranks = card.card_json.runtime_config.data_parallel_size
    return (f"{card.name}-dp{rank}", card.name) if ranks > 1 else (card.name, "")


def _work_row(record: PassRecord) -> StepRow:
    """Return the requests of a step in recorded form, without times."""
    work = record.scheduled_requests
    return StepRow(
        0,
        prefill_tokens=work.sum_prefill_tokens,
        prefill_sequences=work.num_prefill_requests,
        prefill_context_tokens=work.sum_prefill_tokens + work.sum_prefill_kv_tokens,
        decode_sequences=work.num_decode_requests,
    )


def _row(record: PassRecord, role: str, start_ns: int, end_ns: int) -> StepRow:
    work = record.scheduled_requests
    if role == "decode":
        # A prompt whose KV came from a prefill worker is recorded as if it were fully computed here.
        return StepRow(
            start_ns,
            end_ns,
            decode_sequences=max(work.num_decode_requests + work.num_prefill_requests, 1),
            decode_kv_tokens=work.sum_decode_kv_tokens + work.sum_prefill_tokens + work.sum_prefill_kv_tokens,
        )
    return StepRow(
        start_ns,
        end_ns,
        prefill_tokens=work.sum_prefill_tokens,
        prefill_sequences=work.num_prefill_requests,
        prefill_context_tokens=work.sum_prefill_tokens + work.sum_prefill_kv_tokens,
        decode_sequences=work.num_decode_requests,
        decode_kv_tokens=work.sum_decode_kv_tokens,
    )


def _load(record: PassRecord) -> Load:
    work, queue = record.scheduled_requests, record.queued_requests
    return Load(
        running=work.num_prefill_requests + work.num_decode_requests,
        waiting=queue.num_prefill_requests + queue.num_decode_requests,
        waiting_prefill_tokens=queue.sum_prefill_tokens,
    )
