"""Settings of the planner: FULCRUM_PLANNER_* and the common ones."""

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from libs.runtime.http.settings import HttpSettings
from libs.runtime.settings import MemberName, own_name


class PlannerSettings(HttpSettings):
    """Read from the environment once, at start."""

    model_config = SettingsConfigDict(env_prefix="FULCRUM_PLANNER_", extra="ignore", populate_by_name=True)

    port: int = Field(8001, ge=0, le=65535)
    """HTTP port; 0 picks one."""
    id: MemberName = Field(default_factory=lambda: own_name("planner"))
    """Name of this planner in its decisions."""
    mode: Literal["off", "advisory", "auto"] = "auto"
    """auto gives workers the roles and budgets that it decides; advisory publishes what it would do and acts on
    nothing; off decides nothing."""
    tpot_target_ms: float = Field(100.0, gt=0, le=60_000)
    """Time per output token that roles are decided for; the gateway's own, `FULCRUM_GATEWAY_TPOT_TARGET_MS`, where
    requests name none."""
    period_ms: int = Field(200, ge=20, le=60_000)
    """A decision every so often; one a second while nothing runs and all workers say so."""
    window_ms: int = Field(2_000, ge=100, le=600_000)
    """How far back a decision looks."""
    lag_ms: int = Field(400, ge=0, le=10_000)
    """How long before now the window ends, so that telemetry of it has come in."""
    kept_decisions: int = Field(1_000, ge=1, le=100_000)
    """Decisions answered by /v1/decisions; some KB each."""
