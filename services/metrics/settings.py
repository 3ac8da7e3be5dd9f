"""Settings of the metrics service: FULCRUM_METRICS_* and the common ones."""

from pathlib import Path
from typing import Annotated, ClassVar, Final, Self

import httpx
from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from libs.observe.pods import ROLE_LABEL, PodQuery
from libs.policy.alerts.rules import AlertLimits
from libs.policy.planner.limits import ModelLimits
from libs.policy.verdict.state import Threshold
from libs.runtime.http.settings import HttpSettings
from libs.runtime.settings import MemberName, own_name

MS_NS = 1_000_000
MAX_PORT: Final = 65_535


def _addresses(text: str) -> str:
    """Return the addresses. Raise ValueError, which names the first unusable one."""
    for address in _split(text):
        try:
            url = httpx.URL(address)
        except (httpx.InvalidURL, ValueError) as error:
            raise ValueError(f"{address!r} is no address: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or " " in address or not 0 < (url.port or 1) <= MAX_PORT:
            raise ValueError(f"{address!r} is no address like http://host:port/path")
    return text


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


Addresses = Annotated[str, AfterValidator(_addresses)]


class MetricsSettings(HttpSettings):
    """The settings of the metrics service, read from the environment once at start."""

    model_config = SettingsConfigDict(env_prefix="FULCRUM_METRICS_", extra="ignore", populate_by_name=True)
    tls_role: ClassVar[str] = "metrics"

    port: int = Field(8002, ge=0, le=65535)
    """Port of the HTTP API; 0 picks a free one."""
    lag_ms: int = Field(400, ge=0, le=10_000)
    """Time between the end of the newest window and now. A worker sends every 100 ms, at rest every 300, and announces
    a step only after 100 ms; the broker adds some milliseconds. With a smaller lag, the end of a window is often not
    covered yet.
    """
    live_lag_ms: int = Field(50, ge=0, le=10_000)
    """Time after its end at which a window of history and stream is written. Later telemetry revises it: with a small
    lag windows appear sooner, with a large one they are revised less often.
    """
    gauge_window_ms: int = Field(15_000, ge=100, le=600_000)
    """Window of the Prometheus gauges: the scrape interval, so that no time falls between two scrapes."""
    history_file: str = ""
    """File that keeps the history of two days over restarts, on a local disk, up to 0.3 MB a worker. Demand is kept
    beside it in a file whose name ends in .demand: a month by the minute, 400 days by the quarter of an hour. Empty: in
    memory alone."""
    day_s: float = Field(86_400.0, ge=600, le=86_400)
    """Length of the day that demand's seasons follow, in seconds; lower values simulate a day in minutes."""
    capacity_slo: str = Field("", pattern=r"^(ttft=.+,tpot=.+)?$")
    """Service level that capacity alerts guard, say ttft=2s,tpot=50ms. Plans are made every five minutes in a separate
    process, which measures in the lab for some minutes when traffic is new. Empty: no such alerts."""
    capacity_confidence: float = Field(0.95, ge=0.5, lt=1)
    """Probability with which those plans should suffice for future demand."""
    worker_start_s: float = Field(0.0, ge=0, le=86_400)
    """Time that a worker takes to start, for the text of capacity alerts; 0: unknown."""
    observe: Addresses = ""
    """Addresses of vLLM servers to observe from their own /metrics, separated by commas. They replace a suite: Kafka
    and Redis are not used, and all times are estimates.
    """
    observe_file: str = ""
    """TOML file of such servers, which is read again when it changes."""
    observe_dynamo: str = ""
    """Discovery folder (DYN_FILE_KV) of a Dynamo fleet whose workers to observe, alone or beside such servers."""
    observe_kubernetes: str = ""
    """Label selector of the pods to observe in a Kubernetes cluster, say app=vllm, instead of such a list."""
    observe_namespace: str = ""
    """Namespace of the observed pods; empty: that of the service account or kubeconfig."""
    observe_port: int = Field(0, ge=0, le=65_535)
    """Port of the observed pods' metrics; 0: each pod's container port named metrics or http, or 8000."""
    observe_role_label: str = ROLE_LABEL
    """Label of pods with their role: prefill or decode; others do both."""
    observe_kubeconfig: str = ""
    """Kubeconfig file; empty: the pod's service account, or outside a cluster the file that kubectl uses."""
    observe_every_ms: int = Field(0, ge=0, le=1_000)
    """Time between two scrapes of each server; 0: twice a second, or once a second where there are over a hundred."""
    observe_act: bool = False
    """Move observed servers between prefill and decode: pods by their role label, others by their router."""
    observe_router: Addresses = Field("", pattern=r"^(https?://[^\s,]+)?$")
    """Address of the sglang-router in front of servers that are not pods, to change their roles."""
    observe_prefill_min: int = Field(1, ge=1)
    """Minimum number of a model's prefill servers to keep."""
    observe_decode_min: int = Field(1, ge=1)
    """Minimum number of a model's decode servers to keep."""
    observe_rest_s: float = Field(30.0, ge=5, le=3_600)
    """The least time between two moves, in seconds."""
    traces_url: Addresses = Field("", pattern=r"^(https?://[^\s,]+)?$")
    """Destination of traces of requests: the OTLP/HTTP address of an OpenTelemetry collector, say
    http://collector:4318/v1/traces. Empty sends no traces."""
    traces_share: float = Field(1.0, ge=0, le=1)
    """Share of requests to trace among those without a trace context from the client."""
    id: MemberName = Field(default_factory=lambda: own_name("metrics"))
    """Name in the alerts topic; by default made from the host's name."""
    shared: bool = False
    """Share step telemetry with the cluster's other metrics services, by partition, so that each shows the whole
    cluster. Each needs its own id.
    """
    planner_url: Addresses = Field("", pattern=r"^(https?://[^\s,]+)?$")
    """Address of the planner, say http://127.0.0.1:8001, for the page's models and role buttons. Empty: the page shows
    neither.
    """
    public_url: Addresses = Field("", pattern=r"^(https?://[^\s,]+)?$")
    """Public address of the page, for links in alerts. Empty: the address it listens on."""
    alert_webhooks: Addresses = ""
    """URLs to post alerts to in Alertmanager's API v2, as http://alertmanager:9093/api/v2/alerts, separated by commas;
    each gets every alert. Empty: none."""
    alert_window_ms: int = Field(2_000, ge=200, le=60_000)
    """Window over which alerts measure shares of GPU time."""
    alert_for_ms: int = Field(10_000, ge=0, le=3_600_000)
    """Time for which imbalance, growing queues, KV wait and a full KV cache must last before an alert fires."""
    alert_clear_ms: int = Field(30_000, ge=0, le=3_600_000)
    """Time for which an alert must be clear before it is over. It doubles each time the alert has fired in the last
    half hour, up to four times."""
    alert_busy: float = Field(0.9, gt=0, le=1)
    """Busy share of its time from which a phase with waiting work counts as starved."""
    alert_busy_clear: float = Field(0.75, ge=0, le=1)
    """Busy share below which the phase no longer counts as starved."""
    alert_idle: float = Field(0.6, gt=0, le=1)
    """Share of time in which nothing runs, from which the other phase counts as idle."""
    alert_idle_clear: float = Field(0.4, ge=0, le=1)
    """Share below which the phase no longer counts as idle."""
    alert_queue_tokens: int = Field(8_192, ge=1)
    """Waiting prompt tokens per prefill GPU that make a queue long. A growing queue gains as many in a minute."""
    alert_queue_sequences: int = Field(16, ge=1)
    """Waiting sequences per decode GPU that make a queue long. A growing queue gains as many in a minute."""
    alert_kv_wait: float = Field(0.2, gt=0, le=1)
    """Share of decode's time spent waiting for KV blocks from which transfers count as its bottleneck."""
    alert_kv_wait_clear: float = Field(0.1, ge=0, le=1)
    """Share below which transfers no longer count as its bottleneck."""
    alert_kv_used: float = Field(0.95, gt=0, le=1)
    """Share of a worker's KV blocks held by sequences from which its cache counts as nearly full."""
    alert_kv_used_clear: float = Field(0.85, ge=0, le=1)
    """Share below which its cache no longer counts as nearly full."""
    alert_stuck_ms: int = Field(10_000, ge=200, le=3_600_000)
    """A worker with work is stuck when no step has ended for this long."""
    alert_stale_ms: int = Field(3_000, ge=500, le=60_000)
    """A worker's telemetry is stale when it ended this long ago."""
    ttft_deadline_ms: int = Field(5_000, ge=1)
    """TTFT deadline for the pressure of prompts where requests name none."""
    tpot_target_ms: float = Field(100.0, gt=0, le=60_000)
    """TPOT target for the pressure of decodes where neither a planner nor requests name one."""
    slo_objective: float = Field(0.99, gt=0, lt=1)
    """The share of requests that should meet their TTFT deadline, and their TPOT target; each request carries both."""
    slo_requests: int = Field(20, ge=1)
    """Minimum number of requests for a window to be evaluated."""

    @model_validator(mode="after")
    def _thresholds_stand_apart(self) -> Self:
        """Raise ValueError if an alert's clearing threshold is not below its firing one."""
        for name in ("busy", "idle", "kv_wait", "kv_used"):
            fire, clear = getattr(self, f"alert_{name}"), getattr(self, f"alert_{name}_clear")
            if clear >= fire:
                variable = f"FULCRUM_METRICS_ALERT_{name.upper()}"
                raise ValueError(f"{variable}_CLEAR={clear} must be below {variable}={fire}")
        return self

    @property
    def observes(self) -> bool:
        return bool(self.observe or self.observe_file or self.observe_dynamo or self.observe_kubernetes)

    @model_validator(mode="after")
    def _observes_one_list(self) -> Self:
        if sum(map(bool, (self.observe, self.observe_file, self.observe_kubernetes))) > 1:
            raise ValueError("FULCRUM_METRICS_OBSERVE, _OBSERVE_FILE and _OBSERVE_KUBERNETES cannot be combined")
        if self.observes and self.shared:
            raise ValueError("FULCRUM_METRICS_SHARED is for suites: each process observes servers by itself")
        if self.observe_act and bool(self.observe_kubernetes) == bool(self.observe_router):
            raise ValueError(
                "FULCRUM_METRICS_OBSERVE_ACT needs one way to change roles: set FULCRUM_METRICS_OBSERVE_KUBERNETES to"
                " the label selector of pods, or FULCRUM_METRICS_OBSERVE_ROUTER to the address of sglang-router"
            )
        return self

    def observed_addresses(self) -> list[str]:
        return _split(self.observe)

    def observed_file(self) -> Path | None:
        return Path(self.observe_file).expanduser() if self.observe_file else None

    def observed_pods(self) -> PodQuery | None:
        if not self.observe_kubernetes:
            return None
        return PodQuery(self.observe_kubernetes, self.observe_namespace, self.observe_port, self.observe_role_label)

    def observed_limits(self) -> ModelLimits:
        return ModelLimits(prefill_min=self.observe_prefill_min, decode_min=self.observe_decode_min)

    def dynamo_folder(self) -> Path | None:
        return Path(self.observe_dynamo).expanduser() if self.observe_dynamo else None

    def webhooks(self) -> list[str]:
        return _split(self.alert_webhooks)

    def alert_limits(self) -> AlertLimits:
        return AlertLimits(
            window_ns=self.alert_window_ms * MS_NS,
            for_ns=self.alert_for_ms * MS_NS,
            clear_ns=self.alert_clear_ms * MS_NS,
            busy=Threshold(self.alert_busy, self.alert_busy_clear),
            idle=Threshold(self.alert_idle, self.alert_idle_clear),
            queue_tokens=self.alert_queue_tokens,
            queue_sequences=self.alert_queue_sequences,
            kv_wait=Threshold(self.alert_kv_wait, self.alert_kv_wait_clear),
            kv_used=Threshold(self.alert_kv_used, self.alert_kv_used_clear),
            stuck_s=Threshold(self.alert_stuck_ms / 1000, self.alert_stuck_ms / 4000),
            stale_s=Threshold(self.alert_stale_ms / 1000, self.alert_stale_ms / 3000),
            slo_objective=self.slo_objective,
            slo_requests=self.slo_requests,
        )
