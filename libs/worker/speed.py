"""How fast this worker is, as gateways are told: what it has learned of its steps, and of KV that came to it."""

from dataclasses import replace

from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import WorkerFrame
from libs.engine.port import Engine, EngineEvent
from libs.perfmodel.priors import prior_speed
from libs.perfmodel.speed_wire import speed_message
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.transfers import TransferSpeed


class WorkerSpeed:
    """The same object is told until it has changed noticeably."""

    def __init__(self, engine: Engine, gpus: int) -> None:
        can = engine.capabilities
        self._prior = prior_speed(engine.name, engine.device, can.chunk_tokens, can.compute, gpus)
        self._speed = self._prior
        self._transfers = TransferSpeed(can.block_size_tokens)

    @property
    def speed(self) -> Speed:
        """As gateways are told it."""
        return self._speed

    def learned(self, model: StepTimeModel) -> None:
        """The model of its steps is another one now."""
        self._speed = replace(self._speed, step_time=model, measured=model != self._prior.step_time)

    def chunked(self, tokens: int) -> None:
        """A step computes at most so many prompt tokens from now on."""
        self._speed = replace(self._speed, chunk_tokens=max(tokens, 1))

    def on_event(self, event: EngineEvent) -> None:
        """Take KV transfers in."""
        for transfer in event.kv_transfers:
            self._transfers.arrived(transfer.blocks, transfer.end_unix_ns - transfer.start_unix_ns)
        if self._transfers.differs(self._speed.kv_token_ns):
            self._speed = replace(self._speed, kv_token_ns=self._transfers.token_ns)

    def tell(self, frame: WorkerFrame, told: Speed | None) -> Speed:
        """Put the speed into a frame unless that is what was `told` before; the answer is what is told now."""
        if self._speed is not told:
            frame.speed.CopyFrom(speed_message(self._speed))
        return self._speed
