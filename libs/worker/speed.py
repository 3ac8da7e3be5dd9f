from dataclasses import replace

from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import WorkerFrame
from libs.engine.port import Engine
from libs.engine.reports import EngineEvent
from libs.perfmodel.priors import prior_speed
from libs.perfmodel.wire import speed_message
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.handing_over import TransferSpeed


class WorkerSpeed:
    """The speed reported to gateways, learned from steps and KV transfers. The object changes only with a noticeable
    change.
    """

    def __init__(self, engine: Engine, gpus: int) -> None:
        can = engine.capabilities
        self._prior = prior_speed(engine.name, engine.device, can.chunk_tokens, can.compute, gpus)
        self._speed = self._prior
        self._transfers = TransferSpeed(can.block_size_tokens)

    @property
    def speed(self) -> Speed:
        return self._speed

    def learned(self, model: StepTimeModel) -> None:
        self._speed = replace(self._speed, step_time=model, measured=model != self._prior.step_time)

    def chunked(self, tokens: int) -> None:
        """Set how many prompt tokens a step computes at most."""
        self._speed = replace(self._speed, chunk_tokens=max(tokens, 1))

    def on_event(self, event: EngineEvent) -> None:
        """Learn the transfer time of a token's KV from an event."""
        for transfer in event.kv_transfers:
            self._transfers.arrived(transfer.blocks, transfer.end_unix_ns - transfer.start_unix_ns)
        if self._transfers.differs(self._speed.kv_token_ns):
            self._speed = replace(self._speed, kv_token_ns=self._transfers.token_ns)

    def report(self, frame: WorkerFrame, reported: Speed | None) -> Speed:
        """Write the speed into a frame unless it is the one `reported` before. Return the speed."""
        if self._speed is not reported:
            frame.speed.CopyFrom(speed_message(self._speed))
        return self._speed
