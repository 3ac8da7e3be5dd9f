"""A worker's frame as records: its tokens, and the events of its sequences. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from libs.contracts.packing import unpack_f32, unpack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.generation import ApiFinishReason
from libs.engine.reports import Logprob
from libs.policy.gateway.placement import Blocks
from libs.policy.roles import Refusal

_FINISHED: Final = {pb.FINISH_REASON_STOP: ApiFinishReason.STOP, pb.FINISH_REASON_LENGTH: ApiFinishReason.LENGTH}
_REFUSALS: Final[Mapping[int, Refusal]] = {refusal.value: refusal for refusal in Refusal}


class MalformedFrame(Exception):
    """Raised for malformed bytes of a worker, after which nothing on its stream can be trusted."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one frame, in order."""

    sequence_ids: Sequence[int]
    ids: Sequence[int]
    logprobs: Mapping[int, Logprob]
    """Logprobs by position in `ids`."""


class KvOpened(NamedTuple):
    """KV blocks that can be read while the prompt is computed."""

    sequence_id: int
    blocks: Blocks


class Prefilled(NamedTuple):
    """A computed prompt whose blocks wait to be pulled."""

    sequence_id: int
    blocks: Blocks
    cached_tokens: int


class HandOverWanted(NamedTuple):
    """A worker's request to hand a sequence over."""

    sequence_id: int


class SequenceHandedOver(NamedTuple):
    """A sequence handed over by its worker, whose blocks wait for another one."""

    sequence_id: int
    blocks: Blocks
    cached_tokens: int


class SequenceFinished(NamedTuple):
    """A sequence ended by its worker. Without a `reason` it was aborted there, or handed over without KV."""

    sequence_id: int
    reason: ApiFinishReason | None
    cached_tokens: int


class SequenceRefused(NamedTuple):
    """A sequence that the worker refused; `why` is None for a reason unknown to this release."""

    sequence_id: int
    why: Refusal | None
    detail: str


class Failed(NamedTuple):
    """A sequence that the worker cannot continue."""

    sequence_id: int
    code: str
    detail: str
    blocks_lost: bool


Happened = KvOpened | Prefilled | HandOverWanted | SequenceHandedOver | SequenceFinished | SequenceRefused | Failed


class WorkerNews(NamedTuple):
    introduced: bool
    speed: bool
    tokens: Tokens | None
    happened: Sequence[Happened]


def read_news(frame: pb.WorkerFrame, kv_kind: str, *, kv_once: bool) -> WorkerNews:
    """Parse a frame of a worker with KV of kind `kv_kind`, which `kv_once` limits to one read. Raise MalformedFrame."""
    happened: list[Happened] = []
    for event in frame.events:
        read = _READERS.get(event.WhichOneof("event"))
        if read is not None:
            happened.append(read(event, kv_kind, kv_once))
    return WorkerNews(frame.HasField("worker"), frame.HasField("speed"), _read_tokens(frame), happened)


def _opened(event: pb.SequenceEvent, kind: str, once: bool) -> Happened:
    source = event.kv_opened.kv
    return KvOpened(event.sequence, Blocks(source, source.worker_id, kind, once))


def _prefilled(event: pb.SequenceEvent, kind: str, once: bool) -> Happened:
    source = event.prefilled.kv
    return Prefilled(event.sequence, Blocks(source, source.worker_id, kind, once), event.prefilled.cached_tokens)


def _leaving(event: pb.SequenceEvent, _kind: str, _once: bool) -> Happened:
    return HandOverWanted(event.sequence)


def _moved(event: pb.SequenceEvent, kind: str, once: bool) -> Happened:
    source = event.moved.kv
    return SequenceHandedOver(event.sequence, Blocks(source, source.worker_id, kind, once), event.moved.cached_tokens)


def _finished(event: pb.SequenceEvent, _kind: str, _once: bool) -> Happened:
    return SequenceFinished(event.sequence, _FINISHED.get(event.finished.reason), event.finished.cached_tokens)


def _refused(event: pb.SequenceEvent, _kind: str, _once: bool) -> Happened:
    return SequenceRefused(event.sequence, _REFUSALS.get(event.refused.code), event.refused.detail)


def _failed(event: pb.SequenceEvent, _kind: str, _once: bool) -> Happened:
    failed = event.failed
    known = failed.code in pb.FailureCode.values()
    code = pb.FailureCode.Name(failed.code) if known else f"failure code {failed.code}"
    return Failed(event.sequence, code, failed.detail, blocks_lost=failed.code == pb.FAILURE_CODE_KV_LOST)


# kv_pulling is not read: it fixes the decode worker, which only changes on refusal or loss anyway.
_READERS: Final[Mapping[str | None, Callable[[pb.SequenceEvent, str, bool], Happened]]] = {
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
