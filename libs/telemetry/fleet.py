"""The timelines of all workers, bounded in number. Time is passed in."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Final

import numpy as np

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import SharedLoads, SharedWorker, StepBatch
from libs.contracts.step_row import ENTRY_BYTES
from libs.perfmodel.utilisation import Effort
from libs.policy.kv_links import KvLink
from libs.telemetry.columns import (
    ENCODED_IMAGES,
    NEVER,
    UNREPORTED,
    WINDOW_NS,
    Followed,
    Ints,
    PrefillShares,
    StepBatchColumns,
    WindowAccumulator,
    lay,
)
from libs.telemetry.directory import WorkerDirectory
from libs.telemetry.estimates import Estimates
from libs.telemetry.nodes import Clocks, NodeGpus, NodeStats, Peer
from libs.telemetry.relayed import (
    ARRIVED,
    COVERED_TO,
    LAST_STEP_END,
    Relayed,
    RelayedRow,
    columns_of,
    relayed_of,
)
from libs.telemetry.rollups import MAX_WORKERS, NO_ROLE, PREFILL, PROVISIONAL, ROLE_NUMBERS, Cells
from libs.telemetry.steps import PhaseTime, RunningStep
from libs.telemetry.timeline import MAX_STEPS, BatchOutcome, Timeline

MAX_FLEET_STEPS: Final = 1_250_000
"""The bound on steps of all workers, 90 MB with what the steps computed.

Each worker keeps an equal part, at most `timeline.MAX_STEPS` and at least `MIN_STEPS`. Steps of 1,000 workers at 60
steps a second are kept for 20 s, for telemetry that comes late and for utilisation. Roll-ups (260 MB), requests (30
MB) and the process itself (80 MB) bring the total to 460 MB.
"""
MIN_STEPS: Final = 1_024
MAX_FOLLOWED: Final = 1_024
"""The maximum number of batches gathered before they are entered, a tenth of a second of a thousand workers."""
MAX_AHEAD_NS: Final = 60 * 1_000_000_000
"""The furthest that a batch may reach into the future. Clocks differ by less, so a later batch is malformed."""
ENCODE_LAST_NS: Final = 10 * 1_000_000_000
"""The longest step that encodes images. Windows that begin later than this after a batch with such a step contain no
encoding time.
"""
Changes = Callable[[Sequence[str], Ints, Ints], None]
"""A callback that receives worker ids with the begin and end of the time that has changed for each."""
Windows = Callable[[str, int, int], PhaseTime]
"""A function that returns the contents of a worker's windows for [low, high) in Unix ns."""


class FleetTelemetry:
    """The telemetry of every worker, read by this process or reported by others."""

    def __init__(self, prefill_shares: PrefillShares, windows: Windows = lambda *_: PhaseTime()) -> None:
        """Create an empty fleet; `windows` supplies the time of workers whose telemetry other processes read."""
        self._prefill_shares = prefill_shares
        self._windows = windows
        self.directory = WorkerDirectory()
        self._taken_over_ns: dict[str, int] = {}
        """The time from which this process reads a worker that another process read before, by id."""
        self._encoded: dict[str, int] = {}
        """The end of the newest batch with encoded images, for each worker read here that has sent one."""
        self._followed: list[Followed] = []  # gathered but not entered yet
        self._nodes = NodeStats(self._incarnation_of)
        self.cpu_waits, self.estimates = self._nodes.cpu_waits, Estimates()
        self.on_change: Changes = lambda *_: None
        """The callback for each batch that counts; it runs before the batch's content is read."""
        self._newest = WindowAccumulator(MAX_WORKERS)
        self._max_steps = MAX_STEPS
        self._batches: Counter[BatchOutcome] = Counter()
        self.latest_arrival_ns: int | None = None  # when the newest batch arrived, by this process's clock

    def add(self, batch: StepBatch, now_ns: int) -> BatchOutcome:
        """Record a worker's batch received at `now_ns`."""
        self.latest_arrival_ns = now_ns
        directory = self.directory
        worker_id, covered_to_ns = batch.worker_id, batch.covered_to_unix_ns
        if covered_to_ns > now_ns + MAX_AHEAD_NS:
            return self._count(BatchOutcome.MALFORMED)
        relayed = directory.relayed.get(worker_id) if directory.relayed else None
        if relayed is not None and covered_to_ns > relayed.covered_to_ns:
            self.settle()  # gathered batches are counted by the other process, which is forgotten after this batch
        timeline = directory.timelines.get(worker_id)
        try:
            followed = None if timeline is None else timeline.follow(batch, now_ns)
        except ValueError:
            return self._count(BatchOutcome.MALFORMED)
        if followed is None:
            return self._count(self._add(batch, worker_id, now_ns))
        directory.mark_seen(worker_id, covered_to_ns)
        self._followed.append(followed)
        if len(self._followed) >= MAX_FOLLOWED:
            self.settle()
        return BatchOutcome.COUNTED

    def add_late(self, batch: StepBatch, now_ns: int) -> BatchOutcome:
        """Record a batch that was skipped when it was new, without effect on clock offsets and on the present
        reporter.
        """
        if batch.covered_to_unix_ns > now_ns + MAX_AHEAD_NS:
            return self._count(BatchOutcome.MALFORMED)
        taken = self._sort_in_time(batch, batch.worker_id)
        if taken is BatchOutcome.COUNTED:
            self.directory.mark_seen(batch.worker_id, batch.covered_to_unix_ns)
            self.add_late_transfers(batch)
        return self._count(taken)

    def add_late_transfers(self, batch: StepBatch) -> None:
        """Count the hand-offs of a late batch, including those of a replaced incarnation."""
        if batch.worker_id not in self.directory.relayed:
            self._nodes.note_transfers([batch])

    @property
    def batches(self) -> Counter[BatchOutcome]:
        self.settle()
        return self._batches

    @property
    def kv_bytes(self) -> Counter[str]:
        """The bytes handed over between workers, by route: "shared_memory" or "network"."""
        self.settle()
        return self._nodes.kv_bytes

    def kv_links(self, now_ns: int) -> list[KvLink]:
        """Return the recent KV speeds between workers that have not left, if this process reads the receiver."""
        self.settle()
        ends = self._nodes.kv_links.ends()
        listed = self.directory.listing(now_ns).workers
        there = (each for each in listed if each.worker_id in ends and not each.left)
        peers = {each.worker_id: Peer(each.model, each.node, self._incarnation_of(each.worker_id)) for each in there}
        return self._nodes.kv_links.among(peers, now_ns)

    @property
    def hardware(self) -> NodeGpus:
        self.settle()
        return self._nodes.hardware

    @property
    def clocks(self) -> Clocks:
        self.settle()
        return self._nodes.clocks

    def expect(self, batch: StepBatch) -> None:
        """Add a worker from before this process started, by its last batch; it counts as silent until it reports."""
        if batch.worker_id not in self.directory.timelines:
            self._sort_in_time(batch, batch.worker_id)

    def relay(self, worker: SharedWorker, now_ns: int, arrived_ns: int | None, reader: str = "") -> bool:
        """Record a worker that the process `reader` reports; return False for an invalid report.

        Nothing changes if as much is already known. `arrived_ns` is when the worker's newest batch reached that
        process, by the clock of this process; None if unknown.
        """
        self.settle()
        batch = worker.newest
        newest_ns = max(batch.covered_to_unix_ns, worker.last_step_end_unix_ns)
        if not batch.worker_id or newest_ns > now_ns + MAX_AHEAD_NS:
            return False
        if self.directory.covers_more(batch.worker_id, batch.covered_to_unix_ns):
            return True
        self._forget(batch.worker_id)
        self.directory.relay(relayed_of(worker, reader))
        self._nodes.add(batch)
        if arrived_ns is not None:
            self.latest_arrival_ns = max(arrived_ns, self.latest_arrival_ns or 0)
            self._nodes.clocks.note(batch.node, batch.covered_to_unix_ns, arrived_ns)
        return True

    def relay_columns(
        self, loads: SharedLoads, described: Iterable[SharedWorker], now_ns: int, *, ahead_ns: int | None, reader: str
    ) -> int:
        """Record workers that the process `reader` reports in columns, as `relay` does for each.

        Return the number of invalid entries; raise ValueError if all are invalid. `ahead_ns` is the lead of this
        process's clock plus the transit time of the report, or None if unknown. Workers without a description are left
        out.
        """
        self.settle()
        directory = self.directory
        table = directory.table(reader, loads.part)
        table.enrol(list(loads.worker_ids))
        for worker in described:
            if table.describe(worker):
                directory.said_new()
            if worker.newest.gpu_readings:
                self._nodes.hardware.add(worker.newest)
        if not loads.covered_to_unix_ns:
            return 0
        columns = columns_of(loads)
        timely = columns[[COVERED_TO, LAST_STEP_END]].max(axis=0) <= np.uint64(now_ns + MAX_AHEAD_NS)
        taken, new = table.newer(columns) & timely, []
        for place in table.contested(taken, directory.timelines.keys()):
            if directory.covers_more(table.worker_ids[place], int(columns[COVERED_TO, place])):
                taken[place] = False
            else:
                self._forget(table.worker_ids[place])
                new.append(place)
        table.take(columns, taken)
        if taken.any():
            directory.relay_rows(table, new, int(columns[COVERED_TO, taken].max()))
            self._nodes.note_waits(table, taken)
            if ahead_ns is not None:
                # By this process's clock, minus the age that the sender reports; the transit time is unknown.
                arrived_ns = np.minimum(columns[ARRIVED].astype(np.int64) + ahead_ns, now_ns)
                self._nodes.note_arrivals(table, taken, arrived_ns)
                self.latest_arrival_ns = max(int(arrived_ns[taken].max()), self.latest_arrival_ns or 0)
        return int(np.count_nonzero(~timely))

    def timeline(self, worker_id: str) -> Timeline | None:
        """Return the timeline of a worker that this process reads; None for others."""
        self.settle()
        return self.directory.timelines.get(worker_id)

    def phases(self, worker_id: str, low_ns: int, high_ns: int) -> PhaseTime:
        """Return the phases of a worker's time in [low, high); an unknown worker has no covered time.

        For a worker that others read, or read at `low_ns`, both ends are moved back to the start of a window.
        """
        self.settle()
        timeline = self.directory.timelines.get(worker_id)
        if timeline is not None and low_ns >= self._taken_over_ns.get(worker_id, 0):
            return timeline.phases(low_ns, high_ns)
        return self._windows(worker_id, low_ns, high_ns)

    def starved_ns(self, worker_id: str, low_ns: int, high_ns: int) -> int:
        """Return the idle ns in [low, high) in which all awaited KV was still being computed; 0 as in `dummy_ns`."""
        timeline = self.timeline(worker_id)
        return timeline.starved_ns(low_ns, high_ns) if timeline else 0

    def dummy_ns(self, worker_id: str, low_ns: int, high_ns: int) -> int:
        """Return the idle nanoseconds in [low, high) spent in dummy steps; 0 if another process reads the worker."""
        timeline = self.timeline(worker_id)
        return timeline.dummy_ns(low_ns, high_ns) if timeline else 0

    def encode_ns(self, worker_id: str, low_ns: int, high_ns: int) -> int:
        """Return the prefill nanoseconds in [low, high) of steps that encoded images; 0 as in `dummy_ns`."""
        timeline = self.timeline(worker_id)
        return timeline.encode_ns(low_ns, high_ns) if timeline else 0

    def window(self, worker_id: str, low_ns: int, high_ns: int) -> tuple[PhaseTime, str] | None:
        """Return the phases of a local worker's time in [low, high), and its role at the end.

        None if the worker had left cleanly by then, or if another process reads it.
        """
        timeline, facts = self.timeline(worker_id), self.directory.facts(worker_id)
        role = timeline.role_at(high_ns - 1) if timeline else ""
        if not role or (facts is not None and facts.left and facts.covered_to_unix_ns <= low_ns):
            return None
        return self.phases(worker_id, low_ns, high_ns), role

    def cells(self, worker_ids: Sequence[str], low_ns: int, high_ns: int) -> Cells:
        """Return `window` of many workers as arrays, without those for which it is None."""
        self.settle()
        times, roles, exact = self._newest.read(low_ns, worker_ids)
        relayed = self.directory.relayed
        if not relayed.keys().isdisjoint(worker_ids):
            exact &= np.array([worker_id not in relayed for worker_id in worker_ids], np.bool_)
        if high_ns - low_ns != WINDOW_NS:
            exact[:] = False
        for index in np.flatnonzero(~exact).tolist():
            roles[index] = NO_ROLE
            if (known := self.window(worker_ids[index], low_ns, high_ns)) is not None:
                time, role = known
                times[index] = time.covered_ns, time.prefill_ns, time.decode_ns, time.kv_wait_ns
                roles[index] = ROLE_NUMBERS[role] + PROVISIONAL * time.provisional
        encode = None
        if self._encoded:  # rarely the case
            since_ns = low_ns - ENCODE_LAST_NS
            ns = [self.encode_ns(w, low_ns, high_ns) if self._encoded.get(w, 0) > since_ns else 0 for w in worker_ids]
            encode = np.minimum(ns, times[:, PREFILL]) if any(ns) else None
        return Cells(worker_ids, times, roles, encode).where(roles != NO_ROLE)

    def effort(self, worker_id: str, low_ns: int, high_ns: int) -> Effort:
        """Return the work that a worker's finished steps computed and moved in [low, high), as far as it is
        reported.
        """
        timeline = self.timeline(worker_id)
        return timeline.effort(low_ns, high_ns) if timeline else Effort()

    def efforts_from_ns(self, worker_id: str) -> int | None:
        """Return the time since which a worker's work is known; None if another process reads the worker."""
        timeline = self.timeline(worker_id)
        return timeline.efforts_from_ns if timeline else None

    def last_step_end_ns(self, worker_id: str) -> int:
        """Return the end of a worker's last finished step, or the worker's start without one; 0 for an unknown
        worker.
        """
        self.settle()
        known = self.directory.newest(worker_id)
        return known.last_step_end_ns if known else 0

    def running_step(self, worker_id: str) -> RunningStep | None:
        """Return the step that a worker has announced and not yet finished."""
        self.settle()
        known = self.directory.newest(worker_id)
        return known.running_step if known else None

    def last_step_ends_ns(self, worker_ids: Sequence[str]) -> Ints:
        """Return `last_step_end_ns` of many workers as an array."""
        self.settle()
        newest = (self.directory.newest(worker_id) for worker_id in worker_ids)
        return np.array([known.last_step_end_ns if known else 0 for known in newest], np.int64)

    def _incarnation_of(self, worker_id: str) -> int:
        known = self.directory.newest(worker_id)
        return known.incarnation if known else 0

    def _count(self, taken: BatchOutcome) -> BatchOutcome:
        self._batches[taken] += 1
        return taken

    def _add(self, batch: StepBatch, worker_id: str, now_ns: int) -> BatchOutcome:
        taken = self._sort_in_time(batch, worker_id)
        if taken is BatchOutcome.COUNTED:
            self.directory.mark_seen(worker_id, batch.covered_to_unix_ns)
            self._nodes.note([batch.node], [batch.covered_to_unix_ns], [now_ns])
            self._note_asides([batch])
        return taken

    def _sort_in_time(self, batch: StepBatch, worker_id: str) -> BatchOutcome:
        timeline = self.directory.timelines.get(worker_id)
        if timeline is None:
            return self._add_stranger(batch, worker_id)
        self.settle()
        timeline.max_steps = self._max_steps
        said = timeline.says
        taken = timeline.add(batch)
        if taken is BatchOutcome.COUNTED:
            self._note_encode(batch, worker_id)
            if timeline.says != said:
                self.directory.said_new()
            self._begin_newest(timeline, worker_id)
            self._report_change(timeline, worker_id, batch.covered_to_unix_ns)
        return taken

    def _note_asides(self, batches: Sequence[StepBatch]) -> None:
        for batch in batches:
            self._nodes.add(batch)
        self.estimates.note(batches)
        if self.directory.relayed:  # the process that reads such a worker counts its transfers
            batches = [batch for batch in batches if batch.worker_id not in self.directory.relayed]
        self._nodes.note_transfers(batches)

    def _add_stranger(self, batch: StepBatch, worker_id: str) -> BatchOutcome:
        timeline = Timeline(self._prefill_shares, turn=len(self.directory.timelines))
        taken = timeline.add(batch)
        if taken is not BatchOutcome.COUNTED:
            return taken
        self.settle()
        if len(self.directory.timelines) >= MAX_WORKERS:
            self._forget(self.directory.longest_silent(self.directory.timelines))
        self.directory.timelines[worker_id] = timeline
        self._note_encode(batch, worker_id)
        self.directory.came_or_went()
        if relayed := self.directory.relayed.get(worker_id):
            self._take_over(timeline, relayed, batch)
        self._begin_newest(timeline, worker_id)
        self._report_change(timeline, worker_id, batch.covered_to_unix_ns)
        self._max_steps = min(MAX_STEPS, max(MIN_STEPS, MAX_FLEET_STEPS // len(self.directory.timelines)))
        return taken

    def settle(self) -> None:
        """Enter all gathered batches; every reader must call it first."""
        if not self._followed:
            return
        gathered, self._followed = StepBatchColumns.of(self._followed), []
        worker_ids = gathered.worker_ids
        self._batches[BatchOutcome.COUNTED] += len(worker_ids)
        self._nodes.note(gathered.nodes, gathered.highs_ns, gathered.arrived_ns)
        add_wait = self.cpu_waits.add
        for worker_id, low_ns, high_ns, waited_ns in zip(
            worker_ids, gathered.lows_ns, gathered.highs_ns, gathered.cpu_waited_ns, strict=True
        ):
            if waited_ns != UNREPORTED:
                add_wait(worker_id, low_ns, high_ns, waited_ns)
        # A worker with estimates drops them with the first batch that has none.
        noted = gathered.batches if len(self.estimates) else list(compress(gathered.batches, gathered.fuller))
        self._note_asides(noted)
        laid = lay(gathered, self._prefill_shares)
        if not laid.plain.all():  # a batch that is not plain affects the worker's other batches
            sorted_in = {worker_ids[index] for index in np.flatnonzero(~laid.plain).tolist()}
            laid.plain[[worker_id in sorted_in for worker_id in worker_ids]] = False
        self.on_change(worker_ids, laid.covers.starts_ns, laid.covers.ends_ns)
        added = self._newest.add(worker_ids, laid, np.array(gathered.arrived_ns, np.int64))
        waits: dict[int, list[tuple[int, int]]] = {}
        for index, *wait in zip(*(each.tolist() for each in laid.waits), strict=True):
            waits.setdefault(index, []).append((wait[0], wait[1]))
        shares, ends_ns, plain = laid.shares.tobytes(), laid.steps.ends_ns.tolist(), laid.plain.tolist()
        timelines, max_steps = self.directory.timelines, self._max_steps
        for index, (worker_id, low_ns, high_ns, columns, (first, last)) in enumerate(
            zip(worker_ids, gathered.lows_ns, gathered.highs_ns, gathered.columns, laid.ranges, strict=True)
        ):
            timeline = timelines[worker_id]
            timeline.max_steps = max_steps
            if columns[ENCODED_IMAGES]:
                self._encoded[worker_id] = high_ns
            if plain[index]:
                part = shares[ENTRY_BYTES * first : ENTRY_BYTES * last]
                last_end_ns = ends_ns[last - 1] if last > first else 0
                timeline.enter((low_ns, high_ns, columns, part, waits.get(index, ())), last_end_ns)
            else:
                self._sort_in(gathered.batches[index], worker_id, timeline)
        for worker_id in {worker_ids[index] for index in np.flatnonzero(~added).tolist()}:
            self._begin_newest(self.directory.timelines[worker_id], worker_id)

    def _note_encode(self, batch: StepBatch, worker_id: str) -> None:
        if batch.steps.encoded_images:
            self._encoded[worker_id] = batch.covered_to_unix_ns

    def _sort_in(self, batch: StepBatch, worker_id: str, timeline: Timeline) -> None:
        """Enter a batch that was already counted and turned out not to be plain."""
        if timeline.sort_in(batch):
            self._report_change(timeline, worker_id, NEVER)
        else:
            self._batches[BatchOutcome.COUNTED] -= 1
            self._batches[BatchOutcome.MALFORMED] += 1

    def _report_change(self, timeline: Timeline, worker_id: str, until_ns: int) -> None:
        self.on_change([worker_id], np.array([timeline.changed_from_ns]), np.array([until_ns]))

    def _begin_newest(self, timeline: Timeline, worker_id: str) -> None:
        """Start the accumulation of batches that follow the last one, without sorting them in."""
        left = timeline.facts is not None and timeline.facts.left
        role = ROLE_NUMBERS.get(timeline.role_at(timeline.known_to_ns), NO_ROLE)
        self._newest.begin(worker_id, NEVER if left else timeline.known_to_ns, role)

    def _take_over(self, timeline: Timeline, relayed: Relayed | RelayedRow, batch: StepBatch) -> None:
        self._taken_over_ns[batch.worker_id] = batch.covered_from_unix_ns
        if relayed.incarnation != batch.incarnation:
            return
        gapless = batch.covered_from_unix_ns <= relayed.covered_to_ns
        timeline.go_on(
            batch,
            last_step_end_ns=relayed.last_step_end_ns,
            lost_batches=relayed.lost_batches,
            running_step=relayed.running_step if gapless else None,
        )

    def _forget(self, worker_id: str) -> None:
        if self.directory.timelines.pop(worker_id, None) is not None:
            self.directory.came_or_went()
        self._newest.forget(worker_id)
        self._encoded.pop(worker_id, None)
        self._taken_over_ns.pop(worker_id, None)
