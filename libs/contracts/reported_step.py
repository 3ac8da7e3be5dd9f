"""An engine step as `/v1/steps` tells it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """An engine step."""

    start_unix_ns: int
    end_unix_ns: int
    """As far as it is known to have run, while it runs."""
    running: bool
    kind: str
    """prefill, decode or mixed."""
    prefill_share: float
    """Part of its time that counts as prefill, 0..1: 1 and 0 but for mixed steps."""
    prefill_tokens: int
    prefill_sequences: int
    decode_sequences: int
    decode_kv_tokens: int
    """Tokens whose KV it read for decode, over all sequences."""
    prefill_ns: int
    """Of it, in the window's covered time."""
    decode_ns: int
