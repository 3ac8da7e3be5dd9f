"""Checks of prompts that one vLLM engine hands over to another, and of their leases. Pure, without vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from libs.contracts.errors import InvalidRequest
from libs.engine.port import Capabilities, EnginePhase, EngineRequest
from libs.engine.reports import FinishReason

if TYPE_CHECKING:
    from libs.engine.vllm.wire import Handover

# vLLM's receiver renews a lease this often during its length. A heartbeat takes time to send and receive.
HEARTBEATS, ROOM_NS = 6, 3_000_000_000

PULL_PARAMETERS: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")
"""The parameters without which NIXL cannot pull."""


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
    pulls: bool,
    margin_ns: int,
    now_ns: int,
) -> HandoverRefusal | None:
    """Return why the engine cannot continue from `handover`, the content of the request's handle; None if it can.

    `pulls` is true if the connector reads the blocks that the handle names. A lease with less than `margin_ns` left is
    refused. Raise InvalidRequest if the tokens do not match the handle.
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
    if pulls and (lacks := missing(handover.parameters, tokens, capabilities)):
        return HandoverRefusal(FinishReason.KV_LOST, f"kv_lost: the handle lacks {lacks}")
    if now_ns > handover.expires_unix_ns - margin_ns:
        return HandoverRefusal(FinishReason.KV_LOST, "kv_lost: the lease of the blocks is over")
    return None


def missing(parameters: Mapping[str, Any], tokens: int, capabilities: Capabilities) -> str:
    """Describe what NIXL lacks to pull a prompt of `tokens` tokens with these parameters; empty if it lacks nothing.

    vLLM 0.32 does not check them, and a missing one may end its EngineCore.
    """
    if absent := [name for name in PULL_PARAMETERS if not parameters.get(name)]:
        return ", ".join(absent)
    if (computed := parameters.get("remote_num_tokens", tokens)) != tokens:
        return f"KV of {tokens} tokens: {computed} were computed"
    groups = parameters["remote_block_ids"]
    if not (isinstance(groups, list) and all(isinstance(group, list) for group in groups)):
        return "remote_block_ids of each group of layers"
    # Layers that attend to a window have fewer blocks than the prompt, and each rank may have only a part of the
    # context.
    shape, block_tokens = capabilities.kv_shape, capabilities.block_size_tokens
    kept = tokens if shape is None else shape.kept_tokens(tokens)
    blocks, parts = max(map(len, groups)), parameters.get("dcp_size") or 1
    if blocks * block_tokens * parts < kept:
        return f"blocks: {blocks} of {block_tokens} tokens for {kept} tokens of the prompt"
    return ""


def check_last_token(request: EngineRequest) -> None:
    """Raise InvalidRequest if the prompt ends with an image and its KV moves to another engine.

    The other engine recomputes the last token and has no file of the image.
    """
    last = request.images[-1].span if request.images else None
    if last is None or request.phase is EnginePhase.BOTH:
        return
    if last.first + last.tokens == len(request.token_ids):
        raise InvalidRequest("an image ends the prompt, which the vllm engine does not hand over: let text follow it")


def lease_ns(kv_lease_ms: int) -> int:
    """Return the time for which vLLM holds blocks for their receiver. vLLM rounds it to whole seconds."""
    return max(kv_lease_ms // 1000, 1) * 1_000_000_000


def lease_margin_ns(kv_lease_ms: int) -> int:
    """Return the remaining time below which a lease is refused: at most half the lease.

    With less time left, a missed heartbeat could let the lease end, and another sequence could overwrite the blocks
    before they are read.
    """
    whole_ns = lease_ns(kv_lease_ms)
    return min(whole_ns // HEARTBEATS + ROOM_NS, whole_ns // 2)


class PullLeases:
    """The times until which the sources of pulled prompts certainly hold the blocks.

    A source frees the blocks at the end of their lease. A receiver that was paused until then would read another
    prompt's KV without an error. Heartbeats renew a lease, but only while the receiver's loop runs.
    """

    def __init__(self, lease_s: int) -> None:
        # Each heartbeat extends the lease to two thirds of its length from then, in whole seconds.
        self._every_ns = lease_s // HEARTBEATS * 1_000_000_000
        self._renewed_ns = lease_s * 2 // 3 * 1_000_000_000
        self._pulls: dict[str, tuple[int, int]] = {}
        """The start of each pull and the time until which its blocks are held, in Unix nanoseconds, by request."""

    def begin(self, name: str, held_until_ns: int, now_ns: int) -> None:
        """Add a request whose prompt will be pulled, with the end of its lease."""
        self._pulls[name] = now_ns, held_until_ns

    def turn(self, now_ns: int) -> None:
        """Record one iteration of the receiver's loop, which has sent any heartbeat that was due."""
        for name, (since_ns, until_ns) in self._pulls.items():
            if since_ns + self._every_ns <= now_ns <= until_ns:
                renewed_ns = now_ns - self._every_ns + self._renewed_ns
                self._pulls[name] = since_ns, max(until_ns, renewed_ns)

    def ended(self, name: str, now_ns: int) -> bool:
        """Remove a request whose pull has ended. Return whether its blocks were certainly held until now."""
        _, until_ns = self._pulls.pop(name, (0, now_ns))
        return now_ns <= until_ns
