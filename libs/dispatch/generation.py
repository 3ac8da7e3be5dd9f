"""One choice of a request, from the queue to its last token."""

from collections import OrderedDict
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final, NamedTuple, Protocol, cast

import structlog

from libs.contracts.errors import AnswerFailed, FulcrumError, InvalidRequest, SequenceFailed
from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import PromptImage
from libs.engine.reports import Logprob
from libs.policy.gateway.placement import Attempt, Blocks, End, EndReason, Placement
from libs.policy.gateway.suspicion import SuspectTrial
from libs.policy.gateway.view import PlacedImage
from libs.policy.ratios import LEVELS, Ratios
from libs.policy.roles import Phase

log = structlog.get_logger()

_PHASES: Final = {Phase.PREFILL: pb.PHASE_PREFILL, Phase.DECODE: pb.PHASE_DECODE, Phase.BOTH: pb.PHASE_BOTH}

# The Retry-After of errors that do not depend on the length of the queue.
RETRY_AFTER_S: Final = 1.0


class ApiFinishReason(Enum):
    """The reason for the regular end of a choice, in OpenAI's terms."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """The answer ended with tool calls. Only the gateway assigns this reason. Workers send STOP."""


Ending = ApiFinishReason | FulcrumError | None
"""The outcome of a choice: a finish reason, an error, or None if its client disconnected."""


def unmade(error: Exception, request_id: str) -> AnswerFailed:
    """Log why the tokens of a choice cannot be turned into an answer. Return the error for the client."""
    log.error("answer could not be built", request_id=request_id, error=repr(error), exc_info=error)
    return AnswerFailed("the generated tokens could not be turned into an answer")


class Sink(Protocol):
    """The receiver of a choice's tokens.

    The last call is to either `finish` or `fail`, unless the choice was cancelled. If `token` or `finish` raises, only
    this choice ends, with `fail`.
    """

    def token(self, token_id: int, logprob: Logprob | None) -> bool:
        """Add the next token. Return True if no further tokens are needed because of a stop string."""
        ...

    def finish(self, reason: ApiFinishReason) -> None: ...

    def fail(self, error: FulcrumError) -> None: ...


@dataclass(slots=True)
class RequestTimes:
    """The times of a request's events in Unix ns. A time is 0 until its event happens."""

    arrival_ns: int
    queued_ns: int = 0
    bound_ns: int = 0
    """The time at which the choice was first bound to workers."""
    predicted_first_ns: int = 0
    """The time of the first token as predicted when the choice was first bound."""
    likely_first_ns: tuple[int, ...] = ()
    """The times by which the first token arrives with the probabilities in `libs.policy.ratios.LEVELS`.

    They are predicted when the choice is first bound; empty if unknown.
    """
    first_token_ns: int = 0
    second_token_ns: int = 0
    last_token_ns: int = 0

    def bound(self, now_ns: int, predicted_ttft_ns: float) -> None:
        """Record that the request was bound. Later calls have no effect."""
        if not self.bound_ns:
            self.bound_ns = now_ns
            self.predicted_first_ns = now_ns + round(predicted_ttft_ns)

    def token(self, now_ns: int) -> None:
        if not self.second_token_ns:
            if self.first_token_ns:
                self.second_token_ns = now_ns
            else:
                self.first_token_ns = now_ns
        self.last_token_ns = now_ns

    @property
    def queue_ns(self) -> int:
        """The time from arrival until the first binding; 0 before it."""
        return max(self.bound_ns - self.arrival_ns, 0)

    @property
    def ttft_ns(self) -> int:
        """The time from arrival until the first token; 0 before it."""
        return max(self.first_token_ns - self.arrival_ns, 0)

    @property
    def predicted_ttft_ns(self) -> int:
        """The predicted time from arrival until the first token; 0 before the first binding."""
        return max(self.predicted_first_ns - self.arrival_ns, 0)

    @property
    def decode_ns(self) -> int:
        """The time from the first token to the last."""
        return self.last_token_ns - self.first_token_ns


class EarlyNews(NamedTuple):
    """A token or event from the decode worker that arrived before the report of the prefill worker."""

    attempt: Attempt
    token_id: int = 0
    logprob: Logprob | None = None
    event: object | None = None
    """The event; None for a token."""


@dataclass(eq=False, slots=True)
class Generation:
    """One choice of a request, which links see as `ports.Work`.

    `output` is authoritative: any worker can continue from these tokens.
    """

    request_id: str
    model: str
    prompt: bytes
    """The prompt's token ids as packed little-endian uint32."""
    prompt_tokens: int
    max_output_tokens: int
    sampling: pb.Sampling
    context: pb.RequestContext
    end_token_ids: frozenset[int]
    """The tokens that end the text; empty if the client wants to continue past them."""
    sink: Sink
    timeline: RequestTimes

    adapter: str = ""
    """The name of the LoRA adapter; empty for none."""
    adapter_source: str = ""
    """The folder of an adapter that the catalogue added; empty if workers load the adapter when they start."""
    batch: bool = False
    """True for a line of a batch job, which yields to all interactive requests."""
    pooling: int = pb.POOLING_UNSPECIFIED
    """The pooling that turns the prompt into one vector. Unspecified if the choice generates tokens."""
    second_from: int = 0
    """The position of the second text in a prompt with a pair of texts; 0 for a single text."""
    vector: bytes = b""
    """The prompt's vector as packed little-endian float32; empty until a worker has computed it."""
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt. Their files are sent to workers that compute the prompt."""
    output: MutableSequence[int] = field(default_factory=list)
    cached_hints: Mapping[str, int] = field(default_factory=dict)
    """The estimated number of leading prompt tokens that each worker has cached, by worker id."""
    cached_tokens: int = 0
    """The number of prompt tokens that the first prefill found cached."""
    placement: Placement = field(init=False)
    siblings: Sequence["Generation"] = ()
    """All choices of the request, including this one."""
    fingerprint: bytes = b""
    """The hash of model and prompt; empty until it is first needed."""
    trial: SuspectTrial | None = None
    """The progress towards clearing the prompt of having killed workers; None if it is not suspected."""
    hopeless_from_ns: float = inf
    """The Unix time in ns from which the first token cannot be expected to meet its deadline.

    It is inf without a deadline, or before it has been computed.
    """
    early: "list[EarlyNews] | None" = None
    """The held-back news of the decode worker. It is None unless the decode was submitted together with its prompt."""

    def __post_init__(self) -> None:
        self.placement = Placement(self.model)

    @property
    def arrival_unix_ns(self) -> int:
        return self.timeline.arrival_ns

    @property
    def ttft_deadline_unix_ns(self) -> int:
        """The deadline of the first token in Unix ns; 0 for none."""
        return self.context.ttft_deadline_unix_ns

    @property
    def tokens(self) -> int:
        """The number of prompt tokens and output tokens so far."""
        return self.prompt_tokens + len(self.output)

    @property
    def pooled(self) -> bool:
        """Return whether the choice ends with a vector of its prompt, so that it needs no decode worker."""
        return self.pooling != pb.POOLING_UNSPECIFIED

    @property
    def placed_images(self) -> Sequence[PlacedImage]:
        """The positions and digests of the prompt's images, in order."""
        if not self.images:
            return ()
        return [PlacedImage(first + tokens, digest) for first, tokens, digest in (each.span for each in self.images)]

    @property
    def answered(self) -> bool:
        """Return whether the choice has a first token or its vector."""
        return bool(self.output or self.vector)

    @property
    def decodes_next(self) -> bool:
        """Return whether the prompt is computed and its blocks wait for a decode worker."""
        return self.placement.blocks is not None

    @property
    def resumed(self) -> bool:
        """Return whether the choice was bound before and then lost its worker or its place there."""
        return self.placement.resumed

    def token(self, token_id: int, logprob: Logprob | None, now_ns: int) -> ApiFinishReason | FulcrumError | None:
        """Append the next token. Return the outcome of the choice, or None if it continues."""
        self.output.append(token_id)
        self.timeline.token(now_ns)
        try:
            return ApiFinishReason.STOP if self.sink.token(token_id, logprob) else None
        except Exception as error:  # whatever the error is, other choices of that worker continue
            return unmade(error, self.request_id)

    def conclude(self, outcome: Ending) -> Ending:
        """Notify the sink of the outcome and return it. If the sink raises, the outcome becomes an error."""
        if isinstance(outcome, ApiFinishReason):
            try:
                self.sink.finish(outcome)
            except Exception as error:
                outcome = unmade(error, self.request_id)
        if isinstance(outcome, FulcrumError):
            self.sink.fail(outcome)
        return outcome

    def complete(self) -> ApiFinishReason | None:
        """Return the finish reason if the output needs no further token, or else None."""
        if self.output and self.output[-1] in self.end_token_ids:
            return ApiFinishReason.STOP
        return ApiFinishReason.LENGTH if len(self.output) >= self.max_output_tokens else None

    def outcome(self, end: End, reason: ApiFinishReason | None) -> Ending:
        """Return the outcome for an `End`. `reason` is the finish reason that a worker sent, if it sent one."""
        if end.why is EndReason.REFUSED:
            return InvalidRequest(end.detail)
        if end.why is EndReason.GAVE_UP:
            return SequenceFailed(end.detail, retry_after_s=RETRY_AFTER_S)
        return reason or self.complete()

    def message(self, attempt: Attempt, blocks: Blocks | None, epoch: int) -> pb.Submit:
        """Return the message that submits the choice to a worker. The worker continues after all tokens so far."""
        submit = pb.Submit(
            sequence=attempt.sequence_id,
            request_id=self.request_id,
            epoch=epoch,
            phase=_PHASES[attempt.phase],
            token_ids=self.prompt + pack_u32(self.output) if self.output else self.prompt,
            prompt_tokens=self.prompt_tokens,
            max_output_tokens=self.max_output_tokens,
            sampling=self.sampling,
            context=self.context,
            kv=cast(pb.KvSource, blocks.source) if blocks is not None and attempt.phase is Phase.DECODE else None,
            model=self.model,
            adapter=self.adapter,
            adapter_source=self.adapter_source,
            pooling=cast(pb.Pooling, self.pooling),
            second_from=self.second_from,
        )
        if blocks is not None and attempt.phase is Phase.PREFILL:
            submit.kv_name = cast(pb.KvSource, blocks.source).handle
        for image in self.images:
            first, tokens, digest = image.span
            own = b"" if attempt.phase is Phase.DECODE else image.data
            submit.images.add(first=first, tokens=tokens, digest=digest, data=own)
        return submit


# The bound on remembered models. The model without a first token for longest is forgotten first.
MOST_MODELS: Final = 256


class Experience:
    """The ratios of actual to predicted times from binding to first token at this gateway, by model."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, Ratios] = OrderedDict()

    def first_token(self, generation: Generation) -> None:
        """Record the first token of a choice that was not rerouted before it."""
        timeline = generation.timeline
        took_ns = timeline.first_token_ns - timeline.bound_ns
        found = self._models.get(generation.model)
        if found is None:
            found = self._models[generation.model] = Ratios()
            if len(self._models) > MOST_MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(generation.model)
        found.add(timeline.predicted_first_ns - timeline.bound_ns, took_ns)

    def bound(self, model: str, timeline: RequestTimes) -> None:
        """Set the likely times of the first token of a request that was just bound."""
        found = self._models.get(model)
        if found is None or timeline.likely_first_ns:
            return
        predicted_ns = timeline.predicted_first_ns - timeline.bound_ns
        ratios = [found.quantile(level) for level in LEVELS]
        if None not in ratios:
            timeline.likely_first_ns = tuple(timeline.bound_ns + round(predicted_ns * (each or 0.0)) for each in ratios)
