from typing import ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from libs.contracts.roles import PLANNERS
from libs.runtime.http.settings import HttpSettings
from libs.runtime.settings import MemberName, own_name


class PlannerSettings(HttpSettings):
    """Settings of the planner, read once at start from FULCRUM_PLANNER_* and the common variables."""

    model_config = SettingsConfigDict(env_prefix="FULCRUM_PLANNER_", extra="ignore", populate_by_name=True)
    tls_role: ClassVar[str] = "planner"

    port: int = Field(8001, ge=0, le=65535)
    """HTTP port; 0 picks a free one."""
    id: MemberName = Field(default_factory=lambda: own_name("planner"))
    """Name of this planner in its decisions. It must begin with "planner": workers distinguish its moves from those of
    people by this prefix.
    """
    mode: Literal["off", "advisory", "auto"] = "auto"
    """auto carries out decisions on roles and budgets; advisory only publishes them; off makes none.
    """
    tpot_target_ms: float = Field(100.0, gt=0, le=60_000)
    """TPOT target of role decisions if neither limits, requests nor the catalogue name one. The
    gateway's own target is `FULCRUM_GATEWAY_TPOT_TARGET_MS`.
    """
    model_catalogue: bool = False
    """Run a pool of workers for the models of the cluster's catalogue."""
    models: str = "[]"
    """JSON list of models to add to the catalogue if it lacks them: objects with name, source, size_bytes and the other
    fields of an entry (docs/models.md).
    """
    models_turn_s: float = Field(10.0, gt=0, le=3_600)
    """Minimum time that a busy worker of the pool keeps its model while requests for other models wait."""
    models_cold_cost_gpu_s: float = Field(300.0, gt=0, le=1e6)
    """Assumed cost of one cold start in GPU-seconds; a higher value keeps idle models loaded for longer."""
    models_window_s: float = Field(60.0, ge=1, le=3_600)
    """Window over which forecasts count the maximum number of models in use at once."""
    models_sleep: bool = True
    """Put models to sleep if they are not worth the GPU time they occupy."""
    period_ms: int = Field(200, ge=20, le=60_000)
    """Interval between decisions; one second while no worker has work."""
    window_ms: int = Field(2_000, ge=100, le=600_000)
    """Length of the window of telemetry behind a decision."""
    lag_ms: int = Field(400, ge=0, le=10_000)
    """Time between the end of that window and now, so that its telemetry has arrived."""
    kept_decisions: int = Field(1_000, ge=1, le=100_000)
    """Maximum number of decisions kept for /v1/decisions; each takes a few KB."""
    actuator: Literal["none", "process", "docker", "kubernetes"] = "none"
    """Actuator that starts and ends workers when the planner wants more or fewer: the launcher of `fulcrum up --spare`,
    Docker's engine, a Kubernetes cluster, or nothing, so that the planner only recommends.
    """
    actuator_url: str = ""
    """For `process`, the URL of the launcher. For `docker`, the URL of the engine; empty is the engine's default. For
    `kubernetes`, a kubeconfig file; empty is the pod's own account.
    """
    actuator_service: str = "decode"
    """For `docker`, the Compose service whose containers started workers copy. For `kubernetes`, the Deployment to
    scale as NAMESPACE/NAME; one for each model, separated by commas.
    """
    actuator_most: int = Field(8, ge=0, le=1_000)
    """For `docker` and `kubernetes`, the maximum number of workers started per model."""
    start_up_s: float = Field(30.0, ge=0, le=3_600)
    """Expected time from a request for a worker until it serves on an existing machine. Used until a start has been
    measured.
    """
    machine_start_up_s: float = Field(0.0, ge=0, le=3_600)
    """Expected additional time until a machine is available, for example with a node autoscaler. Used until it has been
    measured.
    """
    scale_calm_s: float = Field(60.0, ge=1, le=86_400)
    """Time for which work must have been low before the planner gives up a worker."""
    scale_linger_s: float = Field(120.0, ge=0, le=86_400)
    """Time for which a started worker that is no longer needed stays on standby, warm, before it is ended."""

    @field_validator("id")
    @classmethod
    def _is_of_a_planner(cls, value: str) -> str:
        if not value.startswith(PLANNERS):
            raise ValueError(f"begins with {PLANNERS!r}, or its moves count as made by a person")
        return value
