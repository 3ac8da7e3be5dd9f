"""Output that waits to be sent to one gateway. It grows with sequences' output only, and leaves in few frames."""

from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import SequenceEvent, WorkerFrame
from libs.engine.reports import Logprob, SequenceOutput
from libs.worker.wire import logprobs_message, sequence_of

MAX_FRAME_TOKENS = 8192
"""Tokens in one frame: with 20 top logprobs each it stays below half of gRPC's message bound."""
MAX_FRAME_SCORES = 262_144
"""Logprobs of prompts in one frame, most likely tokens counted too, 8 bytes each; one prompt has fewer."""
MAX_PENDING = 262_144
"""Tokens and events that may wait; a gateway that lets more pile up has stopped reading."""


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
        """Whether the gateway is to be dropped."""
        return len(self._token_ids) + len(self._events) > MAX_PENDING

    def add_tokens(self, output: SequenceOutput) -> None:
        """Tokens that a step brought, with their logprobs where there are any."""
        sequence = sequence_of(output.sequence_id)
        if output.logprobs:
            self._logprobs.update(enumerate(output.logprobs, len(self._token_ids)))
        for token_id in output.token_ids:
            self._sequences.append(sequence)
            self._token_ids.append(token_id)

    def add_event(self, event: SequenceEvent) -> None:
        """Add an event; it is sent after all tokens that were added before it."""
        self._events.append(event)

    def take(self, frame: WorkerFrame) -> None:
        """Move as much into `frame` as fits one; events wait until no token is left."""
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
        """How many tokens one frame takes."""
        count, scores = min(len(self._token_ids), MAX_FRAME_TOKENS), 0
        for index in sorted(self._logprobs):
            prompt = self._logprobs[index].prompt
            if not prompt:
                continue
            scores += len(prompt) * (1 + len(prompt[0].top))
            if scores > MAX_FRAME_SCORES and 0 < index < count:
                return index
        return count
