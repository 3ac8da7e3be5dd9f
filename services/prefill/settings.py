"""Settings of the prefill service: a worker whose first role is prefill."""

from typing import Literal

from libs.worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """`WorkerSettings` with this service's defaults."""

    id: str = "prefill-0"
    role: Literal["prefill", "decode", "mixed", "standby"] = "prefill"
