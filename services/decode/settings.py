"""Settings of the decode service: a worker whose first role is decode."""

from typing import Literal

from pydantic import Field

from libs.runtime.settings import MemberName, own_name
from libs.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """`WorkerSettings` with this service's defaults."""

    id: MemberName = Field(default_factory=lambda: own_name("decode"))
    role: Literal["prefill", "decode", "mixed", "standby"] = "decode"
