"""One choice of one request, from the queue to its last token."""

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

# Retry-After of errors that do not depend on the queue.
RETRY_AFTER_S: Final = 1.0


class ApiFinishReason(Enum):
    """The reason for the normal end of a choice, in the API's terms."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """The sequence stopped after calling tools. Only the gateway assigns this reason; no worker sends it."""


Ending = ApiFinishReason | FulcrumError | None
"""The ending of a choice: a finish reason, an error, or None if its client left."""


def unmade(error: Exception, request_id: str) -> AnswerFailed:
    """Log why a choice's tokens cannot be turned into an answer, and return the error for its client."""
    log.error("answer could not be built", request_id=request_id, error=repr(error), exc_info=error)
    return AnswerFailed("the generated tokens could not be turned into an answer")


class Sink(Protocol):
    """The receiver of a choice's tokens.

    Exactly one of `finish` and `fail` is called, last, unless the choice was cancelled. An exception in `token` or
    `finish` ends only this choice, with `fail`.
    """

    def token(self, token_id: int, logprob: Logprob | None) -> bool:
        """Accept the next token. Return true if the text ends with it (a stop string) and no more are wanted."""
        ...

    def finish(self, reason: ApiFinishReason) -> None: ...

    def fail(self, error: FulcrumError) -> None: ...


@dataclass(slots=True)
class RequestTimes:
    """Times of a request's events in Unix ns; 0 before they happen."""

    arrival_ns: int
    queued_ns: int = 0
    bound_ns: int = 0
    """The time of the choice's first binding to workers."""
    predicted_first_ns: int = 0
    """The time of the first token as predicted at the first binding."""
    likely_first_ns: tuple[int, ...] = ()
    """The times by which the first token arrives with the chances in `libs.policy.ratios.LEVELS`, as predicted at its
    first binding; empty if unknown.
    """
    first_token_ns: int = 0
    second_token_ns: int = 0
    last_token_ns: int = 0

    def bound(self, now_ns: int, predicted_ttft_ns: float) -> None:
        """Record that the request was bound; only the first time counts."""
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
        """The time from arrival until bound; 0 if it never was."""
        return max(self.bound_ns - self.arrival_ns, 0)

    @property
    def ttft_ns(self) -> int:
        """The time from arrival until the first token; 0 without one."""
        return max(self.first_token_ns - self.arrival_ns, 0)

    @property
    def predicted_ttft_ns(self) -> int:
        """The time from arrival until the first token, as predicted when it was bound; 0 if it never was."""
        return max(self.predicted_first_ns - self.arrival_ns, 0)

    @property
    def decode_ns(self) -> int:
        """The time from the first token until the last."""
        return self.last_token_ns - self.first_token_ns


class EarlyNews(NamedTuple):
    """A token or an event of a decode worker that arrived before the report of the prompt's worker."""

    attempt: Attempt
    token_id: int = 0
    logprob: Logprob | None = None
    event: object | None = None
    """The event; None for a token."""


@dataclass(eq=False, slots=True)
class Generation:
    """One choice of a request; links see it as `ports.Work`.

    Its `output` is authoritative: any worker continues from these tokens.
    """

    request_id: str
    model: str
    prompt: bytes
    """The token ids of the prompt as packed little-endian uint32."""
    prompt_tokens: int
    max_output_tokens: int
    sampling: pb.Sampling
    context: pb.RequestContext
    end_token_ids: frozenset[int]
    """Tokens that end the text; empty if the client wants to continue past them."""
    sink: Sink
    timeline: RequestTimes

    adapter: str = ""
    """The name of the LoRA adapter to compute with; empty for none."""
    adapter_source: str = ""
    """The folder of an adapter in the catalogue; empty if workers have it configured."""
    batch: bool = False
    """True for a line of a batch job, which yields to all interactive requests."""
    pooling: int = pb.POOLING_UNSPECIFIED
    """The pooling that turns the prompt into one vector; unspecified if tokens are generated."""
    second_from: int = 0
    """The position in the prompt of a pair's second text; 0 for none."""
    vector: bytes = b""
    """The prompt's vector as packed little-endian float32, once a worker has computed it."""
    images: tuple[PromptImage, ...] = ()
    """The prompt's images, whose files go to workers that compute it."""
    output: MutableSequence[int] = field(default_factory=list)
    cached_hints: Mapping[str, int] = field(default_factory=dict)
    """The number of leading prompt tokens that each worker is believed to hold, by worker id."""
    cached_tokens: int = 0
    """The number of prompt tokens that the first prefill found cached."""
    placement: Placement = field(init=False)
    siblings: Sequence["Generation"] = ()
    """All choices of the request, this one included."""
    fingerprint: bytes = b""
    """The hash of model and prompt; empty until it is first needed."""
    trial: SuspectTrial | None = None
    """The progress towards clearing the prompt of killing workers; None if it is not suspected."""
    hopeless_from_ns: float = inf
    """The Unix time from which the first token cannot be expected in time; inf without a deadline, or if not judged."""
    early: "list[EarlyNews] | None" = None
    """News of the decode worker that is handled once the prompt's worker has reported; None if news cannot be early."""

    def __post_init__(self) -> None:
        self.placement = Placement(self.model)

    @property
    def arrival_unix_ns(self) -> int:
        return self.timeline.arrival_ns

    @property
    def ttft_deadline_unix_ns(self) -> int:
        """The deadline of the choice's first token in Unix ns; 0 for none."""
        return self.context.ttft_deadline_unix_ns

    @property
    def tokens(self) -> int:
        """The number of prompt and output tokens so far."""
        return self.prompt_tokens + len(self.output)

    @property
    def pooled(self) -> bool:
        """Return whether the choice's prompt becomes a vector, so that it needs no decode worker."""
        return self.pooling != pb.POOLING_UNSPECIFIED

    @property
    def placed_images(self) -> Sequence[PlacedImage]:
        """The images of the choice's prompt, in order."""
        if not self.images:
            return ()
        return [PlacedImage(first + tokens, digest) for first, tokens, digest in (each.span for each in self.images)]

    @property
    def answered(self) -> bool:
        """Return whether the choice has a first token, or its vector."""
        return bool(self.output or self.vector)

    @property
    def decodes_next(self) -> bool:
        """Return whether the choice's prompt is computed and its blocks wait for a decode worker."""
        return self.placement.blocks is not None

    @property
    def resumed(self) -> bool:
        """Return whether the choice has been bound before and lost its worker, or its place there."""
        return self.placement.resumed

    def token(self, token_id: int, logprob: Logprob | None, now_ns: int) -> ApiFinishReason | FulcrumError | None:
        """Append the next token and return the ending of the choice, or None if it continues."""
        self.output.append(token_id)
        self.timeline.token(now_ns)
        try:
            return ApiFinishReason.STOP if self.sink.token(token_id, logprob) else None
        except Exception as error:  # whatever the error is, other choices of that worker continue
            return unmade(error, self.request_id)

    def conclude(self, outcome: Ending) -> Ending:
        """Notify the sink and return the ending of the choice; a failing sink turns success into an error."""
        if isinstance(outcome, ApiFinishReason):
            try:
                self.sink.finish(outcome)
            except Exception as error:
                outcome = unmade(error, self.request_id)
        if isinstance(outcome, FulcrumError):
            self.sink.fail(outcome)
        return outcome

    def complete(self) -> ApiFinishReason | None:
        """Return the finish reason if the output is complete by itself, regardless of the worker's next message."""
        if self.output and self.output[-1] in self.end_token_ids:
            return ApiFinishReason.STOP
        return ApiFinishReason.LENGTH if len(self.output) >= self.max_output_tokens else None

    def outcome(self, end: End, reason: ApiFinishReason | None) -> Ending:
        """Return the ending for an `End`. `reason` is the finish reason that a worker sent, if any."""
        if end.why is EndReason.REFUSED:
            return InvalidRequest(end.detail)
        if end.why is EndReason.GAVE_UP:
            return SequenceFailed(end.detail, retry_after_s=RETRY_AFTER_S)
        return reason or self.complete()

    def message(self, attempt: Attempt, blocks: Blocks | None, epoch: int) -> pb.Submit:
        """Return the message that submits the choice to a worker, which continues from all tokens so far."""
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


# Models remembered; the one whose last first token is oldest is forgotten first.
MOST_MODELS: Final = 256


class Experience:
    """The ratios of actual to predicted time from binding to the first token at this gateway."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, Ratios] = OrderedDict()

    def first_token(self, generation: Generation) -> None:
        """Record a first token from the workers that its request was first bound to."""
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
        """Set the likely times of the first token of a request that has just been bound."""
        found = self._models.get(model)
        if found is None or timeline.likely_first_ns:
            return
        predicted_ns = timeline.predicted_first_ns - timeline.bound_ns
        ratios = [found.quantile(level) for level in LEVELS]
        if None not in ratios:
            timeline.likely_first_ns = tuple(timeline.bound_ns + round(predicted_ns * (each or 0.0)) for each in ratios)
