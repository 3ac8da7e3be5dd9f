from typing import Literal

from pydantic import Field

from libs.runtime.settings import MemberName, own_name
from libs.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """The settings of a worker whose first role is decode."""

    id: MemberName = Field(default_factory=lambda: own_name("decode"))
    role: Literal["prefill", "decode", "mixed", "standby"] = "decode"
