"""Pending output of one gateway. Only sequences' output adds to it, and it leaves in as few frames as possible."""

from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import SequenceEvent, WorkerFrame
from libs.engine.reports import Logprob, SequenceOutput
from libs.worker.wire import logprobs_message, sequence_of

# With 20 top logprobs for each token, a frame stays below half of gRPC's message bound.
MAX_FRAME_TOKENS = 8192
# Prompt logprobs in one frame at 8 bytes each, top tokens included; one prompt has fewer.
MAX_FRAME_SCORES = 262_144
# Tokens and events that may be pending; a gateway beyond it has stopped reading.
MAX_PENDING = 262_144


class Outbox:
    """Pending tokens and events of one gateway, in order."""

    def __init__(self) -> None:
        self._sequences: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[int, Logprob] = {}
        self._events: list[SequenceEvent] = []

    def __bool__(self) -> bool:
        return bool(self._token_ids or self._events)

    @property
    def overflowed(self) -> bool:
        """Whether so much is pending that the gateway must be dropped."""
        return len(self._token_ids) + len(self._events) > MAX_PENDING

    def add_tokens(self, output: SequenceOutput) -> None:
        """Append the tokens of a step with their logprobs, if any."""
        sequence = sequence_of(output.sequence_id)
        if output.logprobs:
            self._logprobs.update(enumerate(output.logprobs, len(self._token_ids)))
        for token_id in output.token_ids:
            self._sequences.append(sequence)
            self._token_ids.append(token_id)

    def add_event(self, event: SequenceEvent) -> None:
        """Append an event. It is sent after all tokens appended before it."""
        self._events.append(event)

    def take(self, frame: WorkerFrame) -> None:
        """Move as much into `frame` as fits. Events stay until no token is left."""
        count = self._fitting()
        frame.token_sequences = pack_u32(self._sequences[:count])
        frame.token_ids = pack_u32(self._token_ids[:count])
        del self._sequences[:count], self._token_ids[:count]
        if self._logprobs:
            sent = {index: logprob for index, logprob in self._logprobs.items() if index < count}
            self._logprobs = {i - count: logprob for i, logprob in self._logprobs.items() if i >= count}
            frame.logprobs.extend(logprobs_message(index, logprob) for index, logprob in sent.items())
        if not self._token_ids:
            frame.events.extend(self._events)
            self._events.clear()

    def _fitting(self) -> int:
        """Return how many pending tokens fit one frame."""
        count, scores = min(len(self._token_ids), MAX_FRAME_TOKENS), 0
        for index in sorted(self._logprobs):
            prompt = self._logprobs[index].prompt
            if not prompt:
                continue
            scores += len(prompt) * (1 + len(prompt[0].top))
            if scores > MAX_FRAME_SCORES and 0 < index < count:
                return index
        return count
