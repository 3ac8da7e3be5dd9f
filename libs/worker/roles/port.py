"""The role plug-in: what a worker does in one role."""

from typing import Protocol

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import SequenceEvent, Submit
from libs.engine.port import EngineRequest, SequenceOutput
from libs.policy.worker.slots import Room


class Role(Protocol):
    """Maps a gateway's work to the engine's and back. Sync and without I/O: the host does the rest."""

    def request(self, submit: Submit, key: int, chain_root: bytes) -> EngineRequest:
        """The engine's request for `submit`; raises InvalidRequest with what is wrong."""
        ...

    def event(self, sequence: int, output: SequenceOutput) -> SequenceEvent | None:
        """What the gateway is told beside the tokens; None when the tokens say it all."""
        ...

    def prefill_budget(self, assignment: Assignment) -> int:
        """Prompt tokens that one engine step may compute in this role."""
        ...

    def slots(self, assignment: Assignment, room: Room) -> tuple[int, int]:
        """How many (prefill, decode) requests the worker takes at once: the total of its credits."""
        ...
