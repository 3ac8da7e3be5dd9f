from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from libs.contracts import metric_names as names
from libs.stores.collectors import KvIndexCollector, RegistryCollector
from libs.stores.kvindex import KvIndex
from libs.stores.registry import Registry
from services.gateway.turns import FairSlots

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)

_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    # The labelled children are looked up once per model, because a look-up costs as much as an increment.

    prompt_tokens: Counter
    cached_tokens: Counter
    output_tokens: Counter
    reroutes: Counter
    stale_role_retries: Counter
    moves: Counter
    recomputes: Counter
    ttft_predicted: Histogram
    queue_s: Histogram
    ttft_s: Histogram
    tpot_s: Histogram


class GatewayMetrics:
    def __init__(self) -> None:
        # Bounded by the number of served models, which is small.
        self._of_model: dict[str, ModelMetrics] = {}
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.responses = self._counter("responses", "Answered requests", "route", "status")
        self.failed_answers = self._counter(
            "failed_answers", "Answers that ended with an error, including streams with status 200", "route", "code"
        )
        self.choices = self._counter("choices", "Ended choices", "model", "outcome", "reason")
        self.prompt_tokens = self._counter("prompt_tokens", "ISL summed over choices", "model")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found cached", "model")
        self.output_tokens = self._counter("output_tokens", "OSL summed over choices", "model")
        self.reroutes = self._counter("reroutes", "Choices sent to another worker because one failed them", "model")
        self.stale_role_retries = self._counter(
            "bounces", "Choices sent to another worker because the first one had changed its role", "model"
        )
        self.frames = self._counter("frames", "Frames on workers' streams", "direction")
        self.frame_bytes = self._counter("frame_bytes", "Bytes of those frames", "direction")
        self.silences = self._counter("silences", "Workers dropped because they were silent")
        self.late_s = self._counter("late_seconds", "Delay of the event loop beyond its scheduled time")
        self.moves = self._counter("moves", "Running choices moved to another worker with their KV", "model")
        self.recomputes = Counter(
            names.GATEWAY_RECOMPUTES,
            "Prompts computed again after their first token",
            ("model",),
            registry=self.registry,
        )
        self.ttft_predicted = Histogram(
            names.GATEWAY_TTFT_PREDICTED_RATIO,
            "TTFT predicted at binding, divided by the measured TTFT",
            ("model",),
            buckets=_RATIOS,
            registry=self.registry,
        )
        self.ttft_likely = Counter(
            names.GATEWAY_TTFT_LIKELY,
            "First tokens, by whether they came within the time predicted with this chance",
            ("model", "chance", "came"),
            registry=self.registry,
        )
        self._slots_held = Gauge(
            names.GATEWAY_SLOTS_HELD, "Occupied slots of those that tenants share", ("of",), registry=self.registry
        )
        self._slots_waiting = Gauge(
            names.GATEWAY_SLOTS_WAITING, "Requests that wait for such a slot", ("of",), registry=self.registry
        )
        self.queue_s = self._histogram("queue_seconds", "Time from arrival until bound to workers", _SECONDS)
        self.ttft_s = self._histogram("ttft_seconds", "Time from arrival until the first token", _SECONDS)
        self.tpot_s = self._histogram("tpot_seconds", "Mean time per output token after the first", _TOKEN_SECONDS)

    def of_model(self, model: str) -> ModelMetrics:
        found = self._of_model.get(model)
        if found is None:
            shown = {field.name: getattr(self, field.name).labels(model) for field in fields(ModelMetrics)}
            found = self._of_model[model] = ModelMetrics(**shown)
        return found

    def watch(
        self,
        *,
        waiting: Callable[[], float],
        late: Callable[[], float],
        live: Callable[[], float],
        workers: Callable[[], float],
        unpaired: Callable[[], float],
        legs: Callable[[], float],
        tasks: Callable[[], float],
        open_requests: Callable[[], float],
        body_bytes: Callable[[], float],
    ) -> None:
        """Register gauges that call these functions at each scrape."""
        for name, text, read in (
            ("waiting", "Choices in the queue", waiting),
            ("late", "Waiting choices whose first token can no longer be in time", late),
            ("live", "Choices that have not ended", live),
            ("workers", "Workers with an open stream", workers),
            ("unpaired_workers", "Registered workers that get no work, because no other has compatible KV", unpaired),
            ("legs", "Sequences on workers", legs),
            ("tasks", "Background tasks", tasks),
            ("open", "Requests whose body is read or whose answer is not fully sent", open_requests),
            ("body_bytes", "Bytes of those requests' bodies", body_bytes),
        ):
            Gauge(f"fulcrum_gateway_{name}", text, registry=self.registry).set_function(read)

    def watch_slots(self, slots: Mapping[str, FairSlots]) -> None:
        """Register gauges of held and waited-for slots, labelled by the mapping's keys."""
        for name, each in slots.items():
            self._slots_held.labels(name).set_function(partial(getattr, each, "held"))
            self._slots_waiting.labels(name).set_function(each.__len__)

    def watch_index(self, index: KvIndex, *, late: Callable[[], float]) -> None:
        """Register the KV index's counters and a gauge of requests bound before the index answered."""
        self.registry.register(KvIndexCollector(index))
        gauge = Gauge(
            names.GATEWAY_LATE_HINTS, "Requests bound before their prefix look-up was answered", registry=self.registry
        )
        gauge.set_function(late)

    def watch_registry(self, registry: Registry) -> None:
        """Register a metric of the registry entries that were skipped as invalid."""
        self.registry.register(RegistryCollector(registry))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"fulcrum_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"fulcrum_gateway_{name}", text, ("model",), buckets=buckets, registry=self.registry)


class ImageFetchMetrics:
    """The metrics of images fetched from URLs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._fetches = Counter(
            names.GATEWAY_IMAGE_FETCHES,
            "Images fetched from addresses, by outcome: ok or the reason for the failure",
            ("outcome",),
            registry=registry,
        )
        self._bytes = Counter(names.GATEWAY_IMAGE_FETCH_BYTES, "Bytes of fetched images", registry=registry)
        self._seconds = Counter(names.GATEWAY_IMAGE_FETCH_SECONDS, "Time of all fetches", registry=registry)

    def ended(self, outcome: str, size_bytes: int, seconds: float) -> None:
        self._fetches.labels(outcome).inc()
        self._bytes.inc(size_bytes)
        self._seconds.inc(seconds)


class BatchMetrics:
    """The metrics of this gateway's batch lines, and of all batch jobs in the cluster."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lines = Counter(
            names.GATEWAY_BATCH_LINES, "Batch lines whose answers were committed", ("outcome",), registry=registry
        )
        self._commits = Counter(names.GATEWAY_BATCH_COMMITS, "Transactions of answers", registry=registry)

    def committed(self, ok: Sequence[bool]) -> None:
        """Count one transaction and its lines. Each value is true for a line answered without an error."""
        self._commits.inc()
        completed = sum(ok)
        self._lines.labels("completed").inc(completed)
        self._lines.labels("failed").inc(len(ok) - completed)

    def watch(
        self,
        *,
        in_flight: Callable[[], float],
        unfinished_jobs: Callable[[], float],
        late_jobs: Callable[[], float],
        left_lines: Callable[[], float],
        dropped_events: Callable[[], float],
    ) -> None:
        for name, text, read in (
            (names.GATEWAY_BATCH_IN_FLIGHT, "Batch lines that hold a slot", in_flight),
            (names.GATEWAY_BATCH_JOBS, "Jobs of the cluster that have not ended", unfinished_jobs),
            (names.GATEWAY_BATCH_LATE_JOBS, "Unfinished jobs that are expected to miss their window", late_jobs),
            (names.GATEWAY_BATCH_LEFT_LINES, "Lines of unfinished jobs without an answer", left_lines),
            (names.GATEWAY_BATCH_DROPPED_EVENTS, "Events of unknown jobs for which there was no room", dropped_events),
        ):
            Gauge(name, text, registry=self._registry).set_function(read)
