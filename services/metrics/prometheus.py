"""The state as Prometheus metrics, read at each scrape; finished requests are counted as they come (`requests.py`)."""

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.policy.reading import Gaps
from libs.policy.verdict.assessment import bounded
from libs.policy.verdict.causes import CauseCode
from libs.policy.verdict.state import ModelState
from libs.runtime.clock import Clock
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.history import History
from libs.telemetry.rollups import RollUps
from libs.telemetry.workers import Members, WorkerFacts
from services.metrics.accounting.answer import ClusterOccupancy, HardwareGpu, Occupancy
from services.metrics.accounting.occupancy import cluster_occupancy
from services.metrics.accounting.queues import phase_queues
from services.metrics.refill import Partition
from services.metrics.sharing import Sharing
from services.metrics.state import MetricsState
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.status.report import firing_codes
from services.metrics.stream import Hub

WORKER_LABELS: Final = ("worker", "node", "model", "role")
GPU_LABELS: Final = ("node", "gpu", "name")
PHASES: Final = ("prefill", "decode", "kv_wait", "idle")


class OccupancyCollector(Collector):
    """GPU time by phase, depths and telemetry coverage over the window that ends at `end_ns()`."""

    def __init__(
        self,
        fleet: FleetTelemetry,
        rollups: RollUps,
        members: Members,
        *,
        decisions: Counts[str],
        end_ns: Callable[[], int],
        window_ns: int,
    ) -> None:
        self._fleet = fleet
        self._members = members
        self._rollups = rollups
        self._decisions = decisions
        self._end_ns = end_ns
        self._window_ns = window_ns

    def collect(self) -> Iterator[Metric]:
        occupancy = cluster_occupancy(self._fleet, self._rollups, self._members, self._end_ns(), self._window_ns)
        yield from _cluster(occupancy)
        yield from _workers(occupancy)
        yield from _gpus(occupancy.hardware)
        yield from self._telemetry(occupancy)
        decisions = CounterMetricFamily(names.DECISIONS_SEEN_TOTAL, "Planner decisions read.", labels=("action",))
        for action, count in sorted(self._decisions.items()):
            decisions.add_metric((action,), count)
        yield decisions

    def _telemetry(self, occupancy: ClusterOccupancy) -> Iterator[Metric]:
        batches = CounterMetricFamily(names.TELEMETRY_BATCHES_TOTAL, "Step batches read.", labels=("result",))
        for taken, count in self._fleet.batches.items():
            batches.add_metric((taken.value,), count)
        yield batches
        handed_over = CounterMetricFamily(
            names.KV_TRANSFER_BYTES_TOTAL, "KV bytes handed over between workers.", labels=("way",)
        )
        for way, count in sorted(self._fleet.kv_bytes.items()):
            handed_over.add_metric((way,), count)
        yield handed_over
        speeds = GaugeMetricFamily(
            names.KV_LINK_BYTES_PER_SECOND,
            "KV from one worker to another, in the fastest recent transfers; floor: a lower bound.",
            labels=("source", "worker", "bound"),
        )
        for link in self._fleet.kv_links(self._end_ns()):
            if link.gb_per_s is not None:
                bound = "floor" if link.is_floor else "measured"
                speeds.add_metric((link.source, link.target, bound), link.gb_per_s * 1e9)
        yield speeds
        age = GaugeMetricFamily(
            names.WORKER_TELEMETRY_AGE_SECONDS,
            "Since the end of the last cover, at the window's end.",
            labels=("worker",),
        )
        lost = GaugeMetricFamily(names.WORKER_LOST_BATCHES, "Batches that never arrived.", labels=("worker",))
        dropped = GaugeMetricFamily(names.WORKER_DROPPED_BATCHES, "Batches dropped unsent.", labels=("worker",))
        preemptions = CounterMetricFamily(
            names.WORKER_PREEMPTIONS_TOTAL, "Times a sequence lost its KV blocks to older ones.", labels=("worker",)
        )
        recomputed = CounterMetricFamily(
            names.WORKER_RECOMPUTED_TOKENS_TOTAL, "Tokens computed again after preemption.", labels=("worker",)
        )
        faults = GaugeMetricFamily(
            names.WORKER_POOL_FAULTS, "1 if the accounting of the KV block pool was found wrong.", labels=("worker",)
        )
        pulls = GaugeMetricFamily(
            names.WORKER_KV_PULLS, "KV transfers out of the worker in progress, at most 512.", labels=("worker",)
        )
        refused = CounterMetricFamily(
            names.WORKER_KV_PULLS_REFUSED_TOTAL,
            "KV transfers refused because the maximum was in progress.",
            labels=("worker",),
        )
        dummies = CounterMetricFamily(
            names.WORKER_DUMMY_STEPS_TOTAL, "Dummy steps, run only along with the group.", labels=("worker",)
        )
        cpu_waits = GaugeMetricFamily(
            names.WORKER_CPU_WAIT_RATIO, "Share of time in which a thread waited for a CPU.", labels=("worker",)
        )
        present = [each for each in self._fleet.directory.listed(occupancy.as_of_unix_ns) if not each.left]
        for facts in present:
            labels = (facts.worker_id,)
            age.add_metric(labels, max(0, occupancy.as_of_unix_ns - facts.covered_to_unix_ns) / 1e9)
            lost.add_metric(labels, self._fleet.directory.lost_batches(facts.worker_id))
            dropped.add_metric(labels, facts.dropped_batches)
            preemptions.add_metric(labels, facts.load.preemptions)
            recomputed.add_metric(labels, facts.load.recomputed_tokens)
            faults.add_metric(labels, facts.load.pool_faults)
            pulls.add_metric(labels, facts.load.kv_pulls)
            refused.add_metric(labels, facts.load.refused_kv_pulls)
            cpu_wait = self._fleet.cpu_waits.share(facts.worker_id, occupancy.as_of_unix_ns)
            if cpu_wait is not None:
                cpu_waits.add_metric(labels, cpu_wait)
            if facts.group:
                dummies.add_metric(labels, facts.dummy_steps)
        yield from (age, lost, dropped, preemptions, recomputed, faults, pulls, refused, dummies, cpu_waits)
        yield from self._images(present)

    def _images(self, present: Iterable[WorkerFacts]) -> Iterator[Metric]:
        """Yield the counts of workers that have encoded images."""
        used = CounterMetricFamily(
            names.WORKER_IMAGES_USED_TOTAL, "Images whose embeddings were used in a prompt.", labels=("worker",)
        )
        encoded = CounterMetricFamily(
            names.WORKER_IMAGES_ENCODED_TOTAL,
            "Images encoded; other used images came from the cache.",
            labels=("worker",),
        )
        seconds = CounterMetricFamily(
            names.WORKER_IMAGE_ENCODE_SECONDS_TOTAL, "Time of steps that encoded images.", labels=("worker",)
        )
        cache = GaugeMetricFamily(
            names.WORKER_IMAGE_CACHE_BYTES, "Bytes of cached image embeddings.", labels=("worker",)
        )
        for facts in present:
            labels, load = (facts.worker_id,), facts.load
            if not load.images_encoded:
                continue
            used.add_metric(labels, load.images_used)
            encoded.add_metric(labels, load.images_encoded)
            seconds.add_metric(labels, load.image_encode_ns / 1e9)
            cache.add_metric(labels, load.image_cache_bytes)
        yield from (used, encoded, seconds, cache)


class LiveCollector(Collector):
    """The age of the shown data, the stream's readers, and data that did not reach them or the history."""

    def __init__(self, hub: Hub, history: History, age_ns: Callable[[], int | None]) -> None:
        self._hub = hub
        self._history = history
        self._age_ns = age_ns

    def collect(self) -> Iterator[Metric]:
        aged_ns = self._age_ns()
        if aged_ns is not None:  # None without workers
            yield GaugeMetricFamily(
                names.TELEMETRY_AGE_SECONDS, "Time since the newest instant covered by the shown data.", aged_ns / 1e9
            )
        yield GaugeMetricFamily(names.STREAM_READERS, "Readers of the live stream.", self._hub.readers)
        yield CounterMetricFamily(
            names.STREAM_SKIPPED_TICKS_TOTAL, "Ticks that readers were too slow to receive.", self._hub.skipped_ticks
        )
        yield CounterMetricFamily(
            names.UNREVISED_WINDOWS_TOTAL,
            "Changes of a worker's windows by late telemetry that were not streamed.",
            self._history.unrevised_windows,
        )


def _cluster(occupancy: ClusterOccupancy) -> Iterator[Metric]:
    cluster = GaugeMetricFamily(names.CLUSTER_PHASE_RATIO, "Share of covered GPU time.", labels=("phase",))
    _add_phases(cluster, (), occupancy)
    yield cluster
    # Without workers there is nothing to cover.
    if occupancy.gpus:
        yield GaugeMetricFamily(names.CLUSTER_COVERAGE_RATIO, "Share of time telemetry covers.", occupancy.coverage)
    yield GaugeMetricFamily(names.CLUSTER_GPUS, "GPUs of workers that telemetry should cover.", occupancy.gpus)
    if occupancy.ratio is not None:
        yield GaugeMetricFamily(
            names.CLUSTER_PREFILL_DECODE_RATIO, "Prefill GPU time : decode GPU time.", occupancy.ratio
        )
    phases = GaugeMetricFamily(names.MODEL_PHASE_RATIO, "Share of covered GPU time.", labels=("model", "phase"))
    ratio = GaugeMetricFamily(
        names.MODEL_PREFILL_DECODE_RATIO, "Prefill GPU time : decode GPU time.", labels=("model",)
    )
    for model in occupancy.models:
        _add_phases(phases, (model.model,), model)
        if model.ratio is not None:
            ratio.add_metric((model.model,), model.ratio)
    yield from (phases, ratio)
    clocks = GaugeMetricFamily(
        names.NODE_CLOCK_OFFSET_SECONDS, "How far the node's clock seems ahead of the median node's.", labels=("node",)
    )
    for node in occupancy.nodes:
        clocks.add_metric((node.node,), node.clock_offset_ms / 1e3)
    yield clocks


def _workers(occupancy: ClusterOccupancy) -> Iterator[Metric]:
    phase_labels = (*WORKER_LABELS, "phase")
    phases = GaugeMetricFamily(names.WORKER_PHASE_RATIO, "Share of covered time.", labels=phase_labels)
    mfu = GaugeMetricFamily(names.WORKER_MFU_RATIO, "FLOPs needed : FLOPs possible in that time.", labels=phase_labels)
    mbu = GaugeMetricFamily(names.WORKER_MBU_RATIO, "Bytes needed : bytes possible in that time.", labels=phase_labels)
    coverage = _worker_gauge(names.WORKER_COVERAGE_RATIO, "Share of time telemetry covers.")
    gpus = _worker_gauge(names.WORKER_GPUS, "GPUs of the worker.")
    running = _worker_gauge(names.WORKER_RUNNING_SEQUENCES, "Sequences in the running batch.")
    waiting = _worker_gauge(names.WORKER_WAITING_SEQUENCES, "Sequences that do not run yet.")
    tokens = _worker_gauge(names.WORKER_WAITING_PREFILL_TOKENS, "Prompt tokens still to compute.")
    places = _worker_gauge(names.WORKER_PLACES, "Sequences that the worker runs at a time, if it reports that.")
    kv_used = _worker_gauge(names.WORKER_KV_USED_RATIO, "KV blocks held by sequences : all of its KV blocks.")
    dummy = _worker_gauge(names.WORKER_DUMMY_RATIO, "Share of covered time in dummy steps, a part of idle.")
    since_step = _worker_gauge(
        names.WORKER_SINCE_STEP_SECONDS, "Time since a step ended while the worker has work; otherwise 0."
    )
    for worker in occupancy.workers:
        labels = (worker.id, worker.node, worker.model, worker.role)
        _add_phases(phases, labels, worker)
        for phase, used in (worker.utilisation.by_phase() if worker.utilisation else {}).items():
            for family, value in ((mfu, used.mfu), (mbu, used.mbu)):
                if value is not None:
                    family.add_metric((*labels, phase), value)
        coverage.add_metric(labels, worker.coverage)
        gpus.add_metric(labels, worker.gpus)
        running.add_metric(labels, worker.running)
        waiting.add_metric(labels, worker.waiting)
        tokens.add_metric(labels, worker.waiting_prefill_tokens)
        if worker.places:
            places.add_metric(labels, worker.places)
        if worker.kv_used is not None:
            kv_used.add_metric(labels, worker.kv_used)
        if worker.group and worker.dummy is not None:
            dummy.add_metric(labels, worker.dummy)
        since_step.add_metric(labels, worker.since_step_ms / 1000 if worker.at_hand else 0)
    yield from (phases, mfu, mbu, coverage, gpus, running, waiting, tokens, places, kv_used, dummy, since_step)


def _gpus(hardware: Iterable[HardwareGpu]) -> Iterator[Metric]:
    # Counters that a GPU does not report have no samples rather than zeros.
    reported = list(hardware)
    for name, documentation, field in (
        (names.GPU_UTILISATION_RATIO, "Share of time in which any kernel ran.", "utilisation"),
        (names.GPU_MEMORY_USED_BYTES, "Memory in use.", "memory_used_bytes"),
        (names.GPU_MEMORY_BYTES, "Memory of the GPU.", "memory_bytes"),
        (names.GPU_POWER_WATTS, "Power drawn.", "power_w"),
        (names.GPU_TENSOR_ACTIVE_RATIO, "Share of time in which tensor cores worked.", "tensor_active"),
        (names.GPU_DRAM_ACTIVE_RATIO, "Share of memory bandwidth in use.", "dram_active"),
    ):
        family = GaugeMetricFamily(name, documentation, labels=GPU_LABELS)
        for gpu in reported:
            if (number := getattr(gpu, field)) is not None:
                family.add_metric((gpu.node, gpu.uuid, gpu.name), number)
        yield family


def _add_phases(family: GaugeMetricFamily, labels: tuple[str, ...], occupancy: Occupancy) -> None:
    """Add the four shares; a scope without coverage has no samples rather than zeros."""
    shares = (occupancy.prefill, occupancy.decode, occupancy.kv_wait, occupancy.idle)
    for phase, share in zip(PHASES, shares, strict=True):
        if share is not None:
            family.add_metric((*labels, phase), share)


def _worker_gauge(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=WORKER_LABELS)


class GapCollector(Collector):
    """Gaps of the live reader as Prometheus metrics, read at each scrape."""

    def __init__(self, gaps: Gaps[Partition]) -> None:
        self._gaps = gaps

    def collect(self) -> Iterator[Metric]:
        # Every fate has a sample, so that 0 is shown.
        yield CounterMetricFamily(
            names.TELEMETRY_JUMPS_TOTAL, "Jumps of the reader to the end of a partition.", self._gaps.jumps
        )
        yield GaugeMetricFamily(
            names.TELEMETRY_GAP_RECORDS, "Skipped records that are still to be read.", self._gaps.records
        )
        fates = CounterMetricFamily(names.TELEMETRY_GAP_RECORDS_TOTAL, "Skipped records by outcome.", labels=("fate",))
        for fate, count in self._gaps.fates.items():
            fates.add_metric((fate.value,), count)
        yield fates


class SharingCollector(Collector):
    """Counts of rejected records from other instances as Prometheus metrics, read at each scrape."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def collect(self) -> Iterator[Metric]:
        left_out = CounterMetricFamily(
            names.SHARED_LEFT_OUT_TOTAL, "Records of other instances that were not accepted.", labels=("reason",)
        )
        for reason, count in self._sharing.left_out.items():
            left_out.add_metric((reason.value,), count)
        yield left_out


LABELS = ("model", "phase")


class QueueCollector(Collector):
    """Queue lengths at each scrape; unknown values have no sample rather than zero."""

    def __init__(self, state: MetricsState, clock: Clock) -> None:
        self._state = state
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        requests = GaugeMetricFamily(names.QUEUE_REQUESTS, "Requests waiting at workers and gateways.", labels=LABELS)
        tokens = GaugeMetricFamily(names.QUEUE_PROMPT_TOKENS, "Prompt tokens still to compute.", labels=LABELS)
        fleet, now_ns = self._state.fleet, self._clock.now_ns()
        for queue in phase_queues(fleet.directory.loads(now_ns), fleet.clocks, self._state.gateways, now_ns):
            for family, count in ((requests, queue.requests), (tokens, queue.prompt_tokens)):
                if count is not None:
                    family.add_metric((queue.model, queue.phase), count)
        yield from (requests, tokens)


class VerdictCollector(Collector):
    """Pressures and the verdict at the last evaluation; unknown values have no sample rather than zero."""

    def __init__(self, verdicts: VerdictEvaluator) -> None:
        self._verdicts = verdicts

    def collect(self) -> Iterator[Metric]:
        pressure = GaugeMetricFamily(
            names.PRESSURE,
            "Work over capacity; above 1, a queue grows.",
            labels=("model", "phase"),
        )
        verdict = GaugeMetricFamily(names.VERDICT, "1 for the phase that holds the model up.", labels=("model", "code"))
        seen = self._verdicts.seen
        firing = firing_codes(seen.verdict.causes) if seen else frozenset()
        for each in seen.models if seen else ():
            if isinstance(each, ModelState):
                found = each.pressures
                for phase, value in (
                    ("prefill", found.prefill),
                    ("decode", found.decode),
                    ("decode_batch", found.batch),
                    ("decode_kv", found.kv),
                    ("cluster", found.cluster),
                ):
                    pressure.add_metric((each.model, phase), bounded(value))
            own = [code for model, code in firing if model in (each.model, "")]
            calm = (
                CauseCode.UNKNOWN
                if not isinstance(each, ModelState)
                else CauseCode.IDLE
                if each.at_rest
                else CauseCode.BALANCED
            )
            for code in CauseCode:
                verdict.add_metric((each.model, code), code in own or (not own and code is calm))
        yield pressure
        yield verdict
