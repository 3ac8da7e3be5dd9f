"""The dispatcher's ports: links to workers, the content of their frames, tenants and time.

In a gateway, links are gRPC streams and time is the event loop. The lab supplies simulated ones. Frames are parsed here
without I/O.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from libs.contracts.errors import FulcrumError
from libs.contracts.packing import unpack_f32, unpack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.generation import ApiFinishReason
from libs.engine.reports import Logprob
from libs.policy.gateway.outlook import WorkerOutlook
from libs.policy.gateway.placement import Attempt, Blocks, Partner, WorkerKey
from libs.policy.gateway.view import PlacedImage, WorkerView
from libs.policy.roles import Refusal

_FINISHED: Final = {pb.FINISH_REASON_STOP: ApiFinishReason.STOP, pb.FINISH_REASON_LENGTH: ApiFinishReason.LENGTH}
_REFUSALS: Final[Mapping[int, Refusal]] = {refusal.value: refusal for refusal in Refusal}


class MalformedFrame(Exception):
    """An error for a frame that cannot be parsed. The worker's stream can then no longer be trusted."""


@dataclass(frozen=True, slots=True)
class Tokens:
    sequence_ids: Sequence[int]
    ids: Sequence[int]
    logprobs: Mapping[int, Logprob]
    """The logprobs of tokens by position in `ids`."""


class KvOpened(NamedTuple):
    """An event: a sequence's KV blocks can be read while its prompt is still being computed."""

    sequence_id: int
    blocks: Blocks


class Prefilled(NamedTuple):
    """An event: a prompt is computed, and its blocks can be read by a decode worker."""

    sequence_id: int
    blocks: Blocks
    cached_tokens: int


class HandOverWanted(NamedTuple):
    """An event: a worker asks for one of its sequences to be moved to another worker."""

    sequence_id: int


class SequenceHandedOver(NamedTuple):
    """An event: a worker has stopped a sequence, and another worker can read its blocks."""

    sequence_id: int
    blocks: Blocks
    cached_tokens: int


class SequenceFinished(NamedTuple):
    """An event: a worker has ended a sequence.

    Without a `reason`, the sequence was aborted there, or is handed over without its KV.
    """

    sequence_id: int
    reason: ApiFinishReason | None
    cached_tokens: int
    vector: bytes = b""
    """The prompt's vector as packed little-endian float32; empty unless the sequence is pooled."""


class SequenceRefused(NamedTuple):
    """An event: a worker has refused a sequence. `why` is None for a reason unknown to this release."""

    sequence_id: int
    why: Refusal | None
    detail: str


class Failed(NamedTuple):
    """An event: a worker cannot continue a sequence."""

    sequence_id: int
    code: str
    detail: str
    blocks_lost: bool


AttemptEvent = KvOpened | Prefilled | HandOverWanted | SequenceHandedOver | SequenceFinished | SequenceRefused | Failed


class WorkerUpdate(NamedTuple):
    introduced: bool
    speed: bool
    tokens: Tokens | None
    events: Sequence[AttemptEvent]


def read_update(frame: pb.WorkerFrame, kv_kind: str, *, kv_once: bool) -> WorkerUpdate:
    """Parse a frame. Raise MalformedFrame.

    `kv_kind` and `kv_once` describe the worker's KV; with `kv_once`, blocks can be read only once.
    """
    events: list[AttemptEvent] = []
    for event in frame.events:
        read = _READERS.get(event.WhichOneof("event"))
        if read is not None:
            events.append(read(event, kv_kind, kv_once))
    return WorkerUpdate(frame.HasField("worker"), frame.HasField("speed"), _read_tokens(frame), events)


def _opened(event: pb.SequenceEvent, kind: str, once: bool) -> AttemptEvent:
    source = event.kv_opened.kv
    return KvOpened(event.sequence, Blocks(source, source.worker_id, kind, once))


def _prefilled(event: pb.SequenceEvent, kind: str, once: bool) -> AttemptEvent:
    source = event.prefilled.kv
    return Prefilled(event.sequence, Blocks(source, source.worker_id, kind, once), event.prefilled.cached_tokens)


def _leaving(event: pb.SequenceEvent, _kind: str, _once: bool) -> AttemptEvent:
    return HandOverWanted(event.sequence)


def _moved(event: pb.SequenceEvent, kind: str, once: bool) -> AttemptEvent:
    source = event.moved.kv
    return SequenceHandedOver(event.sequence, Blocks(source, source.worker_id, kind, once), event.moved.cached_tokens)


def _finished(event: pb.SequenceEvent, _kind: str, _once: bool) -> AttemptEvent:
    finished = event.finished
    return SequenceFinished(event.sequence, _FINISHED.get(finished.reason), finished.cached_tokens, finished.pooled)


def _refused(event: pb.SequenceEvent, _kind: str, _once: bool) -> AttemptEvent:
    return SequenceRefused(event.sequence, _REFUSALS.get(event.refused.code), event.refused.detail)


def _failed(event: pb.SequenceEvent, _kind: str, _once: bool) -> AttemptEvent:
    failed = event.failed
    known = failed.code in pb.FailureCode.values()
    code = pb.FailureCode.Name(failed.code) if known else f"failure code {failed.code}"
    return Failed(event.sequence, code, failed.detail, blocks_lost=failed.code == pb.FAILURE_CODE_KV_LOST)


# kv_pulling is ignored. It only confirms the decode worker, which changes only after a refusal or a loss.
_READERS: Final[Mapping[str | None, Callable[[pb.SequenceEvent, str, bool], AttemptEvent]]] = {
    "kv_opened": _opened,
    "prefilled": _prefilled,
    "leaving": _leaving,
    "moved": _moved,
    "finished": _finished,
    "refused": _refused,
    "failed": _failed,
}


def _read_tokens(frame: pb.WorkerFrame) -> Tokens | None:
    if not frame.token_ids and not frame.token_sequences:
        return None
    try:
        sequence_ids, ids = unpack_u32(frame.token_sequences), unpack_u32(frame.token_ids)
        logprobs = {entry.index: _logprob(entry) for entry in frame.logprobs}
    except ValueError as error:
        raise MalformedFrame(str(error)) from None
    if len(sequence_ids) != len(ids):
        raise MalformedFrame(f"{len(ids)} tokens for {len(sequence_ids)} sequence ids")
    return Tokens(sequence_ids, ids, logprobs)


def _logprob(entry: pb.TokenLogprobs) -> Logprob:
    top = tuple(zip(unpack_u32(entry.top_ids), unpack_f32(entry.top_logprobs), strict=True))
    return Logprob(entry.logprob, top, _prompt_logprobs(entry) if entry.prompt else ())


def _prompt_logprobs(entry: pb.TokenLogprobs) -> tuple[Logprob, ...]:
    own = unpack_f32(entry.prompt)
    top = list(zip(unpack_u32(entry.prompt_top_ids), unpack_f32(entry.prompt_top), strict=True))
    most, rest = divmod(len(top), len(own))
    if rest:
        raise ValueError(f"{len(top)} most likely tokens for {len(own)} of a prompt")
    return tuple(Logprob(each, tuple(top[at * most : (at + 1) * most])) for at, each in enumerate(own))


class Work(Protocol):
    """The properties of a choice that a link reads."""

    @property
    def batch(self) -> bool:
        """Return whether the choice is a line of a batch job and not an interactive request."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens."""
        ...

    @property
    def tokens(self) -> int:
        """The number of prompt tokens and output tokens so far."""
        ...

    @property
    def cached_hints(self) -> Mapping[str, int]:
        """The estimated number of leading prompt tokens that each worker has cached, by worker id."""
        ...

    @property
    def placed_images(self) -> Sequence[PlacedImage]:
        """The images of the prompt, in order."""
        ...

    def message(self, attempt: Attempt, blocks: Blocks | None, epoch: int) -> pb.Submit:
        """Return the message by which a worker continues after all tokens so far."""
        ...


class QueuedDemand(NamedTuple):
    """The queue for one model at this gateway, as reported to the model's workers."""

    waiting: int = 0
    waiting_tokens: int = 0
    head_deadline_unix_ns: int = 0


class Link(Protocol):
    """A connection to one worker. It identifies sequences by id.

    All methods are synchronous; the link sends messages later.
    """

    id: str
    key: WorkerKey
    outlook: WorkerOutlook

    @property
    def model(self) -> str:
        """The model assigned to the worker; empty while the worker cannot be reached."""
        ...

    def partner(self) -> Partner | None:
        """Return the worker as the destination of a KV hand-off, or None while it cannot be reached."""
        ...

    def named_blocks(self, tokens: int) -> Blocks | None:
        """Return blocks with a new name for a prompt that this worker would compute at once.

        Return None if the worker does not support names, or if other prompts come first.
        """
        ...

    def quiet(self, sequence_id: int) -> bool:
        """Return whether the worker has been silent since a sequence was sent.

        It may have died before it read the sequence.
        """
        ...

    def submit(self, attempt: Attempt, work: Work, blocks: Blocks | None) -> None:
        """Send work. It uses a free prefill credit, or the decode credit reserved for it."""
        ...

    def proceed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Send a streamed sequence the tokens that the prefill worker sampled."""
        ...

    def hand_over(self, sequence_id: int) -> None:
        """Ask the worker to move a running sequence to another worker, which has reserved a place for it."""
        ...

    def forget(self, sequence_id: int, *, abort: bool) -> None:
        """Ignore further events of a sequence.

        With `abort`, the worker also ends it or frees its blocks.
        """
        ...

    def reserve(self, prompt_tokens: int) -> None:
        """Reserve a decode credit for a sequence with a prompt of this length."""
        ...

    def release(self, prompt_tokens: int) -> None:
        """Return the credit reserved for a sequence with a prompt of this length."""
        ...

    def set_demand(self, demand: QueuedDemand) -> None: ...


class Links(Protocol):
    @property
    def links(self) -> Iterable[Link]:
        """All links, including those that are still connecting."""
        ...

    @property
    def quiet(self) -> frozenset[str]:
        """The ids of workers that have been silent for a short time. They get new work only if no other worker can."""
        ...

    def link(self, key: WorkerKey) -> Link | None: ...

    def serving(self) -> Mapping[str, Link]:
        """Return the links to workers that accept work now, by id."""
        ...

    def views(self) -> list[WorkerView]:
        """Return the workers that accept work now, in the form that the binding policy reads."""
        ...

    def drop_gone(self) -> None:
        """Drop the links of unregistered workers whose stream is down."""
        ...


class ColdModels(Protocol):
    """The models of the catalogue that no worker serves now."""

    def covers(self, name: str) -> bool:
        """Return whether the catalogue decides how long requests wait for the model."""
        ...

    def ends(self, name: str, waited_s: float, *, begun: bool = False) -> FulcrumError | None:
        """Return the error that ends a request's wait, or None if it may continue.

        `begun` means that it already has output.
        """
        ...


class Tenancy(Protocol):
    """The tenants that share the queue and the workers."""

    @property
    def are_distinct(self) -> bool:
        """Return whether tenants are authenticated, so that one may be held back in favour of another."""
        ...

    def weight(self, tenant: str) -> int:
        """Return the tenant's weight for turns and places; the default is 1."""
        ...


class OneForAll:
    """The tenancy without authentication.

    Callers may name any tenant, so all have the same weight and none is held back.
    """

    @property
    def are_distinct(self) -> bool:
        return False

    def weight(self, _tenant: str) -> int:
        return 1


class LinkListener(Protocol):
    """A receiver of a link's events. In a gateway, this is the `Dispatcher`."""

    def received(self, link: Link, update: WorkerUpdate) -> None:
        """Process a frame after the link has applied its credits, load and assignment."""
        ...

    def lost(self, link: Link, *, silent: bool, died: bool) -> None:
        """Handle the end of a stream that broke or was ended because it was silent.

        Its sequences, and those with a decode credit reserved there, must be rerouted. `died` means that the worker
        probably did not leave on purpose.
        """
        ...

    def unreachable(self, link: Link) -> None:
        """Handle the loss of a worker that could not be reached after its stream broke, or was replaced by another
        worker.
        """
        ...
