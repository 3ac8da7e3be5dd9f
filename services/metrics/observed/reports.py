"""Steps that observed servers report themselves, by the plugin of deploy/vllm-plugin. Pure; time is passed in."""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from libs.contracts.errors import Conflict, FulcrumError, InvalidRequest, QueueFull, quoted
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, StepTime
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.step_row import ENTRY_BYTES, step_rows, whole_columns
from libs.observe.fleet import MAX_GPUS, MAX_NAME_CHARS, MOST_SERVERS
from libs.perfmodel.learner import StepTimeLearner
from libs.perfmodel.profiles import prior_step_time
from libs.perfmodel.wire import step_time_message, step_work
from libs.telemetry.columns import LONGEST_NS

SECOND_NS: Final = 1_000_000_000
MOST_REPORTERS: Final = MOST_SERVERS
MAX_STEPS: Final = 20_000
MAX_SPANS: Final = 5_000
MAX_AHEAD_NS: Final = 2 * SECOND_NS
MAX_AGE_NS: Final = 90 * SECOND_NS
MAX_STEP_NS: Final = 600 * SECOND_NS
REPORTS_A_SECOND: Final = 100
"""The maximum number of reports a second from one engine; the plugin sends ten, and eighty while it catches up."""
EXACT_NS: Final = 10 * SECOND_NS
"""The time since a server's last report for which it counts as reporting its own steps."""
FORGET_NS: Final = 3_600 * SECOND_NS
REFIT_NS: Final = 2 * SECOND_NS
# Fields that a report must leave empty. A measurement is not an estimate, and the plugin does not know the other
# fields.
_FOREIGN: Final = ("estimate", "compute", "step_time", "gpu_readings", "kv_transfers", "starved", "sched_delay_ns")


@dataclass(slots=True)
class _Reporter:
    """One engine: a server, or a data-parallel rank of one."""

    incarnation: int
    """The number of process starts, counted by the engine."""
    entered_as: int
    """The incarnation in telemetry. It exceeds those of the estimates before it."""
    learner: StepTimeLearner
    step_time: StepTime | None = None
    sequence: int = 0
    received_ns: int = 0
    group: str = ""
    tokens: float = float(REPORTS_A_SECOND)
    refit_ns: int = 0
    dropped_batches: int = 0


@dataclass(slots=True)
class ReportCounts:
    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """The refused reports by error code."""


class StepReports:
    """The engines that report their steps, with counts of accepted and refused reports."""

    def __init__(self, may_fit: Callable[[bool], bool] = lambda first: True) -> None:
        """Create the record of engines; `may_fit` limits the time spent on fitting step times, as in
        `PhaseEstimator`.
        """
        self._reporters: dict[str, _Reporter] = {}
        self._may_fit = may_fit
        self.counts = ReportCounts()

    def take(self, body: bytes, now_ns: int) -> StepBatch:
        """Convert a report to a batch for publishing. Raise a FulcrumError, and count it, if the report is refused."""
        try:
            batch = _parsed(body, now_ns)
            return self._entered(batch, now_ns)
        except FulcrumError as error:
            self.refused(error)
            raise

    def refused(self, error: FulcrumError) -> None:
        self.counts.refused[error.code] += 1

    def is_exact(self, server: str, now_ns: int) -> bool:
        """Return whether a server, or a rank of it, has reported its steps recently."""
        return any(
            server in (name, each.group) and now_ns < each.received_ns + EXACT_NS
            for name, each in self._reporters.items()
        )

    @property
    def dropped_batches(self) -> int:
        """The number of batches that engines dropped unsent, as they report it."""
        return sum(each.dropped_batches for each in self._reporters.values())

    def _entered(self, batch: StepBatch, now_ns: int) -> StepBatch:
        known = self._reporters.get(batch.worker_id)
        if known is None or batch.incarnation > known.incarnation:
            known = self._begin(batch, known, now_ns)
        if batch.incarnation < known.incarnation:
            raise Conflict(f"{quoted(batch.worker_id)} has been started again: this is of an older process")
        if batch.sequence <= known.sequence:
            raise Conflict(f"report {batch.sequence} of {quoted(batch.worker_id)} came after {known.sequence}")
        elapsed_s = max(now_ns - known.received_ns, 0) / SECOND_NS if known.received_ns else 0.0
        known.tokens = min(known.tokens + elapsed_s * REPORTS_A_SECOND, float(REPORTS_A_SECOND))
        if known.tokens < 1:
            raise QueueFull(f"{quoted(batch.worker_id)} sends over {REPORTS_A_SECOND} reports a second")
        if known.received_ns and now_ns >= known.received_ns + EXACT_NS:
            known.entered_as = now_ns  # later than the estimates entered in the meantime
        known.tokens -= 1
        known.sequence, known.received_ns, known.group = batch.sequence, now_ns, batch.group
        known.dropped_batches = batch.dropped_batches
        self._learn(known, batch, now_ns)
        self.counts.taken += 1
        batch.incarnation = known.entered_as
        if known.step_time is not None:
            batch.step_time.CopyFrom(known.step_time)
        return batch

    def _begin(self, batch: StepBatch, before: _Reporter | None, now_ns: int) -> _Reporter:
        if before is None and len(self._reporters) >= MOST_REPORTERS:
            self._forget(now_ns)
            if len(self._reporters) >= MOST_REPORTERS:
                raise QueueFull(f"{MOST_REPORTERS} engines report already")
        learner = StepTimeLearner(prior_step_time(batch.engine)) if before is None else before.learner
        found = self._reporters[batch.worker_id] = _Reporter(batch.incarnation, now_ns, learner)
        if before is not None:
            found.step_time, found.tokens = before.step_time, before.tokens
        return found

    def _forget(self, now_ns: int) -> None:
        for name, each in list(self._reporters.items()):
            if now_ns > each.received_ns + FORGET_NS:
                del self._reporters[name]

    def _learn(self, known: _Reporter, batch: StepBatch, now_ns: int) -> None:
        for row in step_rows(batch.steps):
            if row.end_unix_ns:
                known.learner.add(step_work(row), row.end_unix_ns - row.start_unix_ns)
        first = known.step_time is None
        if now_ns >= known.refit_ns + REFIT_NS and self._may_fit(first):
            known.refit_ns = now_ns
            if known.learner.refit() or not first:
                known.step_time = step_time_message(known.learner.fitted())


def _parsed(body: bytes, now_ns: int) -> StepBatch:
    """Parse a report and validate the fields that are not checked for Fulcrum's own workers."""
    batch = StepBatch()
    try:
        batch.ParseFromString(body)
    except DecodeError:
        raise InvalidRequest("the body is no StepBatch of proto/fulcrum/telemetry") from None
    if not batch.worker_id:
        raise InvalidRequest("the report has no worker_id", param="worker_id")
    texts = {
        "worker_id": batch.worker_id, "node": batch.node, "engine": batch.engine, "group": batch.group,
        "model": batch.assignment.model,
    }  # fmt: skip
    for name, text in texts.items():
        if len(text) > MAX_NAME_CHARS or not text.isprintable():
            raise InvalidRequest(f"{name} is over {MAX_NAME_CHARS} characters, or has control characters", param=name)
    foreign = [name for name in _FOREIGN if name in {each.name for each, _ in batch.ListFields()}]
    if foreign:
        raise InvalidRequest(f"a report may not have {foreign[0]}", param=foreign[0])
    if not 1 <= batch.gpus <= MAX_GPUS:
        raise InvalidRequest(f"gpus must be 1 to {MAX_GPUS}", param="gpus")
    if batch.assignment.role not in (ROLE_PREFILL, ROLE_MIXED) or not batch.assignment.model:
        raise InvalidRequest("a report needs a model, and role prefill or mixed", param="assignment")
    _check_times(batch, now_ns)
    _check_steps(batch)
    return batch


def _check_times(batch: StepBatch, now_ns: int) -> None:
    low_ns, high_ns = batch.covered_from_unix_ns, batch.covered_to_unix_ns
    if not 0 < high_ns - low_ns <= LONGEST_NS:
        raise InvalidRequest(f"a report covers up to {LONGEST_NS / 1e9:g} s", param="covered_to_unix_ns")
    if high_ns > now_ns + MAX_AHEAD_NS:
        raise InvalidRequest(
            f"the report ends {(high_ns - now_ns) / 1e9:.1f} s ahead of this clock: synchronise the machines' clocks",
            param="covered_to_unix_ns",
        )
    if high_ns < now_ns - MAX_AGE_NS:
        raise InvalidRequest(
            f"the report is {(now_ns - high_ns) / 1e9:.0f} s old, more than {MAX_AGE_NS // SECOND_NS} s",
            param="covered_to_unix_ns",
        )


def _check_steps(batch: StepBatch) -> None:
    if max(len(batch.kv_waits), len(batch.dummy_steps.spans)) > MAX_SPANS:
        raise InvalidRequest(f"a report has at most {MAX_SPANS} waits, and as many dummy steps", param="kv_waits")
    try:
        starts, ends, *_ = whole_columns(batch.steps)
    except ValueError as error:
        raise InvalidRequest(f"steps: {error}", param="steps") from None
    if len(starts) > MAX_STEPS * ENTRY_BYTES:
        raise InvalidRequest(f"a report has at most {MAX_STEPS} steps", param="steps")
    last_ns = 0
    for start_ns, end_ns in zip(array("Q", starts), array("Q", ends), strict=True):
        whole = not end_ns or 0 <= end_ns - start_ns <= MAX_STEP_NS
        in_time = max(last_ns, batch.covered_from_unix_ns - MAX_STEP_NS) <= start_ns < batch.covered_to_unix_ns
        if not (whole and in_time):
            raise InvalidRequest("steps must begin in order and before the report's end, and last", param="steps")
        last_ns = start_ns
