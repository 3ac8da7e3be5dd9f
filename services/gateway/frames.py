"""Reading what workers pack into bytes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libs.contracts.packing import unpack_f32, unpack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import Logprob


class MalformedFrame(Exception):
    """A worker's bytes are not what they should be: nothing on its stream can be trusted any more."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one frame, in order."""

    sequences: Sequence[int]
    ids: Sequence[int]
    logprobs: Mapping[int, Logprob]
    """By place in `ids`."""


def read_tokens(frame: pb.WorkerFrame) -> Tokens | None:
    """The frame's tokens; None when there are none. Raises MalformedFrame."""
    if not frame.token_ids and not frame.token_sequences:
        return None
    try:
        sequences, ids = unpack_u32(frame.token_sequences), unpack_u32(frame.token_ids)
        logprobs = {entry.index: _logprob(entry) for entry in frame.logprobs}
    except ValueError as error:
        raise MalformedFrame(str(error)) from None
    if len(sequences) != len(ids):
        raise MalformedFrame(f"{len(ids)} tokens for {len(sequences)} sequence ids")
    return Tokens(sequences, ids, logprobs)


def _logprob(entry: pb.TokenLogprobs) -> Logprob:
    return Logprob(entry.logprob, tuple(zip(unpack_u32(entry.top_ids), unpack_f32(entry.top_logprobs), strict=True)))
