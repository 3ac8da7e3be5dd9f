"""Settings of the decode service: a worker whose first role is decode."""

from typing import Literal

from libs.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """`WorkerSettings` with this service's defaults."""

    id: str = "decode-0"
    role: Literal["prefill", "decode", "mixed", "standby"] = "decode"
