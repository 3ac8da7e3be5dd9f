"""Settings of the metrics service: FULCRUM_METRICS_* and the common ones."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from libs.runtime.settings import CommonSettings


class MetricsSettings(CommonSettings):
    """Read from the environment once, at start."""

    model_config = SettingsConfigDict(env_prefix="FULCRUM_METRICS_", extra="ignore", populate_by_name=True)

    port: int = Field(8002, ge=0, le=65535)
    """HTTP port; 0 picks one."""
    lag_ms: int = Field(400, ge=0, le=10_000)
    """How long before now windows end. A worker sends every 100 ms, holds back a step of up to 100 ms before it
    announces it, and the broker takes some milliseconds: with less, the end of a window is often not covered yet."""
    live_lag_ms: int = Field(100, ge=0, le=10_000)
    """How long before now the windows of history and stream end. What comes later revises them: a small lag shows
    sooner, a large one is revised less often."""
    gauge_window_ms: int = Field(15_000, ge=100, le=600_000)
    """Window of the Prometheus gauges: the scrape interval, so that no time falls between two scrapes."""
    traces_url: str = Field("", pattern=r"^(https?://\S+)?$")
    """Where traces of requests go: the OTLP/HTTP address of an OpenTelemetry collector, say
    http://collector:4318/v1/traces. Empty: no traces."""
    traces_share: float = Field(1.0, ge=0, le=1)
    """Of requests whose client brings no trace context, the share that is traced."""
