"""Settings of the prefill service: a worker whose first role is prefill."""

from typing import Literal

from pydantic import Field

from libs.runtime.settings import MemberName, own_name
from libs.worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """`WorkerSettings` with this service's defaults."""

    id: MemberName = Field(default_factory=lambda: own_name("prefill"))
    role: Literal["prefill", "decode", "mixed", "standby"] = "prefill"
