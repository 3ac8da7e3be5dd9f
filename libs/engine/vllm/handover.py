"""KV handles between vLLM engines: what makes one of another engine's good here, and what a prefilled one leaves."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from libs.contracts.errors import InvalidRequest
from libs.engine.port import Capabilities, EngineRequest
from libs.engine.reports import FinishReason

if TYPE_CHECKING:
    from libs.engine.vllm.wire import Handover

HEARTBEATS, ROOM_NS = 6, 3_000_000_000
"""vLLM's receiver keeps a lease alive that many times in its length, and a beat needs time to be sent and heard."""
NEVER_NS = 1 << 62
"""The end of a lease that never ends."""


@dataclass(frozen=True, slots=True)
class HandoverRefusal:
    """Why a sequence ends before it began."""

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
    """None where the engine can go on from the request's handle, which says `handover`. Raises InvalidRequest.

    `margin_ns`: so long before its lease ends it is refused already.
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


def lease_ns(kv_lease_ms: int) -> int:
    """How long vLLM holds blocks for their receiver: it counts in whole seconds."""
    return max(kv_lease_ms // 1000, 1) * 1_000_000_000


def lease_margin_ns(kv_lease_ms: int) -> int:
    """How long before its end a lease is too old to be kept alive, with the first heartbeat just missed: then its
    blocks could be another's when they are read. At most half of it."""
    whole_ns = lease_ns(kv_lease_ms)
    return min(whole_ns // HEARTBEATS + ROOM_NS, whole_ns // 2)
