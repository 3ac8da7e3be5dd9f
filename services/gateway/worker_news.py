"""What a worker's frame says, in records: tokens, and what has become of sequences. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from libs.contracts.packing import unpack_f32, unpack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import Logprob
from libs.policy.gateway.effects import Blocks
from libs.policy.roles import Refusal
from services.gateway.generation import FinishReason

_FINISHED: Final = {pb.FINISH_REASON_STOP: FinishReason.STOP, pb.FINISH_REASON_LENGTH: FinishReason.LENGTH}
_REFUSALS: Final[Mapping[int, Refusal]] = {refusal.value: refusal for refusal in Refusal}


class MalformedFrame(Exception):
    """A worker's bytes are not what they should be: nothing on its stream can be trusted any more."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one frame, in order."""

    sequence_ids: Sequence[int]
    ids: Sequence[int]
    logprobs: Mapping[int, Logprob]
    """By place in `ids`."""


class Opened(NamedTuple):
    """Blocks can be read while the prompt is computed."""

    sequence_id: int
    blocks: Blocks


class Prefilled(NamedTuple):
    """The prompt is computed, and its blocks wait."""

    sequence_id: int
    blocks: Blocks
    cached_tokens: int


class Leaving(NamedTuple):
    """The worker would hand the sequence over."""

    sequence_id: int


class Moved(NamedTuple):
    """The worker has let go of it, and its blocks wait."""

    sequence_id: int
    blocks: Blocks
    cached_tokens: int


class Finished(NamedTuple):
    """The worker has ended it; `reason` None: in a way that nobody asked for."""

    sequence_id: int
    reason: FinishReason | None
    cached_tokens: int


class Refused(NamedTuple):
    """The worker has not taken it; `why` None: for a reason that is not known here."""

    sequence_id: int
    why: Refusal | None
    detail: str


class Failed(NamedTuple):
    """The worker cannot go on with it."""

    sequence_id: int
    code: str
    detail: str
    blocks_lost: bool


Happened = Opened | Prefilled | Leaving | Moved | Finished | Refused | Failed


class WorkerNews(NamedTuple):
    """One frame."""

    introduced: bool
    """The worker said who it is."""
    speed: bool
    """It told its speed."""
    tokens: Tokens | None
    happened: Sequence[Happened]


def read_news(frame: pb.WorkerFrame, kv_kind: str, *, kv_once: bool) -> WorkerNews:
    """Of a worker with that kind of KV, whose blocks are good for one reader (`kv_once`) or more. Raises
    MalformedFrame."""
    happened = [found for event in frame.events if (found := _happened(event, kv_kind, once=kv_once)) is not None]
    return WorkerNews(frame.HasField("worker"), frame.HasField("speed"), _read_tokens(frame), happened)


def _happened(event: pb.SequenceEvent, kv_kind: str, *, once: bool) -> Happened | None:
    def blocks(source: pb.KvSource) -> Blocks:
        return Blocks(source, source.worker_id, kv_kind, once)

    sequence_id = event.sequence
    match event.WhichOneof("event"):
        case "kv_opened":
            return Opened(sequence_id, blocks(event.kv_opened.kv))
        case "prefilled":
            return Prefilled(sequence_id, blocks(event.prefilled.kv), event.prefilled.cached_tokens)
        case "leaving":
            return Leaving(sequence_id)
        case "moved":
            return Moved(sequence_id, blocks(event.moved.kv), event.moved.cached_tokens)
        case "finished":
            return Finished(sequence_id, _FINISHED.get(event.finished.reason), event.finished.cached_tokens)
        case "refused":
            why, detail = event.refused.code, event.refused.detail
            return Refused(sequence_id, _REFUSALS.get(why), detail)
        case "failed":
            return _failed(sequence_id, event.failed)
        case _:  # kv_pulling fixes the decode worker, which only changes on refusal or loss anyway
            return None


def _failed(sequence_id: int, failed: pb.Failed) -> Failed:
    known = failed.code in pb.FailureCode.values()
    code = pb.FailureCode.Name(failed.code) if known else f"failure code {failed.code}"
    return Failed(sequence_id, code, failed.detail, blocks_lost=failed.code == pb.FAILURE_CODE_KV_LOST)


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
    return Logprob(entry.logprob, tuple(zip(unpack_u32(entry.top_ids), unpack_f32(entry.top_logprobs), strict=True)))
