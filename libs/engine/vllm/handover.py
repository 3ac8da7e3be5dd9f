"""The hand-over of prompts between vLLM engines: which can be continued from, and for how long. Pure, without vLLM."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from libs.contracts.errors import InvalidRequest
from libs.engine.port import Capabilities, EnginePhase, EngineRequest
from libs.engine.reports import FinishReason

if TYPE_CHECKING:
    from libs.engine.vllm.wire import Handover

# vLLM's receiver renews a lease this many times in its length, and a heartbeat takes time to send and receive.
HEARTBEATS, ROOM_NS = 6, 3_000_000_000


@dataclass(frozen=True, slots=True)
class HandoverRefusal:
    """The reason why a sequence ends before it starts."""

    finish: FinishReason
    detail: str


def refusal(
    request: EngineRequest,
    handover: "Handover | None",
    capabilities: Capabilities,
    *,
    engine_id: str,
    margin_ns: int,
    now_ns: int,
) -> HandoverRefusal | None:
    """Return why the engine cannot continue from the request's handle, unpacked as `handover`; None if it can.

    A lease with less than `margin_ns` left is refused. Raise InvalidRequest if the tokens do not match the handle.
    """
    assert request.kv is not None
    layout, tokens = capabilities.kv_layout, len(request.token_ids)
    if request.kv.kv_layout != layout:
        detail = f"kv_mismatch: the blocks have KV layout {request.kv.kv_layout!r}, this engine has {layout!r}"
        return HandoverRefusal(FinishReason.FAILED, detail)
    if request.kv.tokens != tokens:
        raise InvalidRequest(
            f"the KV handle covers {request.kv.tokens} tokens, the sequence has {tokens}: a vllm engine goes on from"
            " exactly what was prefilled"
        )
    if handover is None:
        return HandoverRefusal(FinishReason.FAILED, "kv_mismatch: the handle is no vllm engine's")
    if handover.engine_id == engine_id:
        return HandoverRefusal(FinishReason.KV_LOST, "kv_lost: vLLM does not pull blocks from itself")
    if now_ns > handover.expires_unix_ns - margin_ns:
        return HandoverRefusal(FinishReason.KV_LOST, "kv_lost: the lease of the blocks is over")
    return None


def check_last_token(request: EngineRequest) -> None:
    """Raise InvalidRequest for an image at the end of a prompt whose KV moves to another engine.

    That engine computes the last token again, and has no image to do it with.
    """
    last = request.images[-1].span if request.images else None
    if last is None or request.phase is EnginePhase.BOTH:
        return
    if last.first + last.tokens == len(request.token_ids):
        raise InvalidRequest("an image ends the prompt, which the vllm engine does not hand over: let text follow it")


def lease_ns(kv_lease_ms: int) -> int:
    """Return how long vLLM holds blocks for their receiver, which it counts in whole seconds."""
    return max(kv_lease_ms // 1000, 1) * 1_000_000_000


def lease_margin_ns(kv_lease_ms: int) -> int:
    """Return the remaining time below which a lease can no longer be relied on. At most half the lease.

    If the first heartbeat was just missed, the blocks could belong to another sequence when they are read.
    """
    whole_ns = lease_ns(kv_lease_ms)
    return min(whole_ns // HEARTBEATS + ROOM_NS, whole_ns // 2)
