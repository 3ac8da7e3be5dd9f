"""Settings of the planner: FULCRUM_PLANNER_* and the common ones."""

from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from libs.runtime.http.settings import HttpSettings
from libs.runtime.settings import MemberName, own_name


class PlannerSettings(HttpSettings):
    """Read from the environment once, at start."""

    model_config = SettingsConfigDict(env_prefix="FULCRUM_PLANNER_", extra="ignore", populate_by_name=True)
    tls_role: ClassVar[str] = "planner"

    port: int = Field(8001, ge=0, le=65535)
    """HTTP port; 0 picks one."""
    id: MemberName = Field(default_factory=lambda: own_name("planner"))
    """Name of this planner in its decisions."""
    mode: Literal["off", "advisory", "auto"] = "auto"
    """auto gives workers the roles and budgets that it decides; advisory publishes what it would do and acts on
    nothing; off decides nothing."""
    tpot_target_ms: float = Field(100.0, gt=0, le=60_000)
    """Time per output token that roles are decided for where neither limits, requests nor the catalogue name one; the
    gateway's own is `FULCRUM_GATEWAY_TPOT_TARGET_MS`."""
    model_catalogue: bool = False
    """Whether it keeps a pool of workers to the models of the cluster's catalogue."""
    models: str = "[]"
    """JSON list of models that are put into a catalogue that lacks them: objects of name, source and size_bytes, and
    what else an entry has (docs/models.md)."""
    models_turn_s: float = Field(10.0, gt=0, le=3_600)
    """A worker of the pool with work keeps its model for at least so long while requests to others wait."""
    models_cold_cost_gpu_s: float = Field(300.0, gt=0, le=1e6)
    """GPU-seconds that one cold start is taken to be worth: higher holds idle models for longer."""
    models_window_s: float = Field(60.0, ge=1, le=3_600)
    """In which the most models in use at once count, in forecasts."""
    models_sleep: bool = True
    """Whether models that are not worth the GPU time that they hold are put to sleep."""
    period_ms: int = Field(200, ge=20, le=60_000)
    """A decision every so often; one a second while nothing runs and all workers say so."""
    window_ms: int = Field(2_000, ge=100, le=600_000)
    """How far back a decision looks."""
    lag_ms: int = Field(400, ge=0, le=10_000)
    """How long before now the window ends, so that telemetry of it has come in."""
    kept_decisions: int = Field(1_000, ge=1, le=100_000)
    """Decisions answered by /v1/decisions; some KB each."""
    actuator: Literal["none", "process", "docker", "kubernetes"] = "none"
    """What starts and ends workers when another number is wished: the launcher of `fulcrum up --spare`, Docker's
    engine, a Kubernetes cluster, or nothing, so that the planner recommends."""
    actuator_url: str = ""
    """Of the launcher, for `process`; of Docker's engine, for `docker`: empty is its usual place. For `kubernetes` a
    kubeconfig file: empty is the pod's own account."""
    actuator_service: str = "decode"
    """For `docker`: the Compose service whose containers started workers are like. For `kubernetes`: the
    Deployment that is scaled, as NAMESPACE/NAME; one for each model, separated by commas."""
    actuator_most: int = Field(8, ge=0, le=1_000)
    """For `docker` and `kubernetes`: workers that it starts at most, of each model."""
    start_up_s: float = Field(30.0, ge=0, le=3_600)
    """From when a worker is asked for until it serves, before that was seen; on a machine that is there."""
    machine_start_up_s: float = Field(0.0, ge=0, le=3_600)
    """And until a machine is there where a worker has to wait for one, as a node autoscaler brings it, before that was
    seen."""
    scale_calm_s: float = Field(60.0, ge=1, le=86_400)
    """Work must have been small for so long before one worker fewer is wished."""
    scale_linger_s: float = Field(120.0, ge=0, le=86_400)
    """A started worker that is no longer wished stands by, warm, for so long before it is ended."""
