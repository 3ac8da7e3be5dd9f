"""Prometheus metrics of a gateway: every name is in this one module."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)


class GatewayMetrics:
    """Metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.responses = Counter(
            "fulcrum_gateway_responses", "Answered requests", ("route", "status"), registry=self.registry
        )
        self.choices = Counter(
            "fulcrum_gateway_choices", "Ended choices", ("model", "outcome", "reason"), registry=self.registry
        )
        self.prompt_tokens = Counter(
            "fulcrum_gateway_prompt_tokens", "ISL summed over choices", ("model",), registry=self.registry
        )
        self.cached_tokens = Counter(
            "fulcrum_gateway_cached_tokens", "Prompt tokens found cached", ("model",), registry=self.registry
        )
        self.output_tokens = Counter(
            "fulcrum_gateway_output_tokens", "OSL summed over choices", ("model",), registry=self.registry
        )
        self.reroutes = Counter(
            "fulcrum_gateway_reroutes", "Choices sent to another worker", ("model",), registry=self.registry
        )
        self.frames = Counter(
            "fulcrum_gateway_frames", "Frames on workers' streams", ("direction",), registry=self.registry
        )
        self.frame_bytes = Counter(
            "fulcrum_gateway_frame_bytes", "Bytes of those frames", ("direction",), registry=self.registry
        )
        self.silences = Counter(
            "fulcrum_gateway_silences", "Workers left because they were silent", registry=self.registry
        )
        self.late_s = Counter(
            "fulcrum_gateway_late_seconds", "Time by which the event loop was late to listen", registry=self.registry
        )
        self.moves = Counter(
            "fulcrum_gateway_moves",
            "Running choices that went on elsewhere with their KV",
            ("model",),
            registry=self.registry,
        )
        self.queue_s = self._histogram("queue_seconds", "Arrival until bound to workers", _SECONDS)
        self.ttft_s = self._histogram("ttft_seconds", "Arrival until the first token", _SECONDS)
        self.tpot_s = self._histogram("tpot_seconds", "Mean time per output token after the first", _TOKEN_SECONDS)

    def watch(
        self,
        *,
        waiting: Callable[[], float],
        live: Callable[[], float],
        workers: Callable[[], float],
        legs: Callable[[], float],
        tasks: Callable[[], float],
        open_requests: Callable[[], float],
    ) -> None:
        """Read depths when they are asked for."""
        for name, text, read in (
            ("waiting", "Choices in the queue", waiting),
            ("live", "Choices that have not ended", live),
            ("workers", "Workers with a stream that stands", workers),
            ("legs", "Sequences on workers", legs),
            ("tasks", "Background tasks", tasks),
            ("open", "Requests whose body is read or whose answer is not fully sent", open_requests),
        ):
            Gauge(f"fulcrum_gateway_{name}", text, registry=self.registry).set_function(read)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"fulcrum_gateway_{name}", text, ("model",), buckets=buckets, registry=self.registry)
