"""One choice of one request, from the queue to its last token: what is asked, what has come, where it runs."""

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, cast

import structlog

from libs.contracts.errors import AnswerFailed, FulcrumError
from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.reports import Logprob
from libs.policy.gateway.effects import Attempt, Blocks
from libs.policy.gateway.placement import Placement
from libs.policy.gateway.suspicion import SuspectTrial
from libs.policy.roles import Phase

log = structlog.get_logger()

_PHASES: Final = {Phase.PREFILL: pb.PHASE_PREFILL, Phase.DECODE: pb.PHASE_DECODE, Phase.BOTH: pb.PHASE_BOTH}


class ApiFinishReason(Enum):
    """Why a choice ended well, in the API's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """It called tools, and stopped; a choice's own finish, which no worker gives."""


Ending = ApiFinishReason | FulcrumError | None
"""How a choice ended: well, failed, or None where its client left."""


def unmade(error: Exception, request_id: str) -> AnswerFailed:
    """What a choice ends with when its tokens cannot be made an answer, which is our fault: the log has the reason."""
    log.error("an answer cannot be made", request_id=request_id, error=repr(error), exc_info=error)
    return AnswerFailed("what was generated could not be made an answer")


class Sink(Protocol):
    """Who takes a choice's tokens. Exactly one of `finish` and `fail` is called, last, unless it was cancelled.

    What `token` and `finish` raise ends this choice alone, with `fail`.
    """

    def token(self, token_id: int, logprob: Logprob | None) -> bool:
        """Take the next token; True when the text ends with it (a stop string), and no more are wanted."""
        ...

    def finish(self, reason: ApiFinishReason) -> None:
        """All tokens have come."""
        ...

    def fail(self, error: FulcrumError) -> None:
        """No more tokens will come."""
        ...


@dataclass(slots=True)
class RequestTimes:
    """When things happened, Unix ns; 0: not yet."""

    arrival_ns: int
    queued_ns: int = 0
    """When it last began to wait."""
    bound_ns: int = 0
    """When it was first bound to workers."""
    predicted_first_ns: int = 0
    """When its first token was expected, as of then."""
    likely_first_ns: tuple[int, ...] = ()
    """By when it comes with the chances of `libs.policy.ratios.LEVELS`, as of then; empty: not known."""
    first_token_ns: int = 0
    last_token_ns: int = 0

    def bound(self, now_ns: int, predicted_ttft_ns: float) -> None:
        """Record that the request was bound; only the first time counts."""
        if not self.bound_ns:
            self.bound_ns = now_ns
            self.predicted_first_ns = now_ns + round(predicted_ttft_ns)

    def token(self, now_ns: int) -> None:
        """A token has come."""
        self.first_token_ns = self.first_token_ns or now_ns
        self.last_token_ns = now_ns

    @property
    def queue_ns(self) -> int:
        """Arrival until bound; 0 when it never was."""
        return max(self.bound_ns - self.arrival_ns, 0)

    @property
    def ttft_ns(self) -> int:
        """Arrival until the first token; 0 when none came."""
        return max(self.first_token_ns - self.arrival_ns, 0)

    @property
    def predicted_ttft_ns(self) -> int:
        """Arrival until the first token, as expected when it was bound; 0 when it never was."""
        return max(self.predicted_first_ns - self.arrival_ns, 0)

    @property
    def decode_ns(self) -> int:
        """First token until the last."""
        return self.last_token_ns - self.first_token_ns


@dataclass(eq=False, slots=True)
class Generation:
    """One choice; links know it as `ports.Work`.

    The tokens in `output` are the truth that a worker continues from, whichever worker that is.
    """

    request_id: str
    model: str
    prompt: bytes
    """Packed little-endian uint32."""
    prompt_tokens: int
    max_output_tokens: int
    sampling: pb.Sampling
    context: pb.RequestContext
    end_token_ids: frozenset[int]
    """Tokens that end the text; empty where the client wants to go on past them."""
    sink: Sink
    timeline: RequestTimes

    adapter: str = ""
    """Of the model that it is computed with; empty: none."""
    adapter_source: str = ""
    """Folder of one that the catalogue names; empty: workers know where theirs are."""
    batch: bool = False
    """A line of a batch job: it comes after all that somebody waits for."""
    output: MutableSequence[int] = field(default_factory=list)
    cached_hints: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens that workers are thought to hold, by worker id."""
    cached_tokens: int = 0
    """Prompt tokens that the first prefill found cached."""
    placement: Placement = field(init=False)
    siblings: Sequence["Generation"] = ()
    """All choices of its request, itself included."""
    fingerprint: bytes = b""
    """Hash of model and prompt; empty until it is first needed."""
    trial: SuspectTrial | None = None
    """Set while its prompt is suspected of killing workers."""

    def __post_init__(self) -> None:
        self.placement = Placement(self.model)

    @property
    def arrival_unix_ns(self) -> int:
        """When the client's request came."""
        return self.timeline.arrival_ns

    @property
    def ttft_deadline_unix_ns(self) -> int:
        """When its first token is due; 0: never."""
        return self.context.ttft_deadline_unix_ns

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return self.prompt_tokens + len(self.output)

    @property
    def decodes_next(self) -> bool:
        """Whether its prompt is computed, and its blocks wait for a decode worker."""
        return self.placement.blocks is not None

    @property
    def resumed(self) -> bool:
        """Whether it was bound already and lost its worker, or its place there."""
        return self.placement.resumed

    def token(self, token_id: int, logprob: Logprob | None, now_ns: int) -> ApiFinishReason | FulcrumError | None:
        """Take the next token; how the choice ends, None while it does not."""
        self.output.append(token_id)
        self.timeline.token(now_ns)
        try:
            return ApiFinishReason.STOP if self.sink.token(token_id, logprob) else None
        except Exception as error:  # whatever it is, what else comes from that worker goes on
            return unmade(error, self.request_id)

    def conclude(self, outcome: Ending) -> Ending:
        """Tell the sink; gives how the choice has ended, which is otherwise than meant where the sink fails."""
        if isinstance(outcome, ApiFinishReason):
            try:
                self.sink.finish(outcome)
            except Exception as error:
                outcome = unmade(error, self.request_id)
        if isinstance(outcome, FulcrumError):
            self.sink.fail(outcome)
        return outcome

    def complete(self) -> ApiFinishReason | None:
        """Whether the output is whole by itself, whatever the worker says next."""
        if self.output and self.output[-1] in self.end_token_ids:
            return ApiFinishReason.STOP
        return ApiFinishReason.LENGTH if len(self.output) >= self.max_output_tokens else None

    def message(self, attempt: Attempt, blocks: Blocks | None, epoch: int) -> pb.Submit:
        """What a worker is asked: to go on from all tokens so far."""
        return pb.Submit(
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
        )
