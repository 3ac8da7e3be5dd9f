"""Changes at a worker that wait for its next frame to the gateway."""

from libs.dispatch.generation import ApiFinishReason as Ended
from libs.dispatch.ports import Failed, Happened, KvOpened, Prefilled, SequenceFinished, SequenceHandedOver
from libs.engine.kv_port import KvHandle
from libs.engine.reports import FinishReason, SequenceOutput
from libs.lab.cluster.host.shape import WorkerShape
from libs.policy.gateway.placement import Blocks


class LabOutbox:
    """The changes of one worker since its last frame."""

    def __init__(self, worker_id: str, shape: WorkerShape) -> None:
        self._worker_id = worker_id
        self._kv_kind = shape.kv_kind
        self.restart()

    def restart(self) -> None:
        """Reset to the full report of a new process."""
        self.tokens: list[int] = []
        self.happened: list[Happened] = []
        self.load = False
        self.assignment = True
        self.speed = True

    @property
    def due(self) -> bool:
        """Whether there is anything beyond a new speed, which can wait for the next frame."""
        return bool(self.tokens or self.happened or self.load or self.assignment)

    def sent(self) -> None:
        """Clear everything that a frame has carried."""
        self.tokens, self.happened = [], []
        self.load = self.assignment = self.speed = False

    def add(self, output: SequenceOutput) -> None:
        self.tokens.extend(output.sequence_id for _ in output.token_ids)
        if not output.only_tokens and (happened := self._event(output)) is not None:
            self.happened.append(happened)

    def _event(self, output: SequenceOutput) -> Happened | None:
        sequence_id, finish = output.sequence_id, output.finish
        if output.streamed_handle is not None:
            return KvOpened(sequence_id, self._blocks(output.streamed_handle))
        if finish is FinishReason.STOP or finish is FinishReason.LENGTH:
            return SequenceFinished(sequence_id, Ended(finish.value), output.cached_tokens)
        if finish is FinishReason.PREFILLED and output.handle is not None:
            return Prefilled(sequence_id, self._blocks(output.handle), output.cached_tokens)
        if finish is FinishReason.HANDED_OVER and output.handle is not None:
            return SequenceHandedOver(sequence_id, self._blocks(output.handle), output.cached_tokens)
        if finish in (FinishReason.KV_LOST, FinishReason.FAILED):
            return Failed(sequence_id, finish.value, output.detail, blocks_lost=finish is FinishReason.KV_LOST)
        return None

    def _blocks(self, handle: KvHandle) -> Blocks:
        return Blocks(handle, self._worker_id, self._kv_kind, once=False)
