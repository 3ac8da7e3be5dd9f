"""Service classes with a meaning to gateways and workers (clients may use others), and the terms of batch jobs."""

import re
from typing import Final

from libs.contracts.errors import InvalidRequest

DEFAULT_CLASS: Final = "online"
# Nobody waits for it in person, so it yields to every other class.
BATCH_CLASS: Final = "batch"


ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_WINDOW_S: Final = 7 * 24 * 3600
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def check_endpoint(endpoint: str) -> None:
    """Raise InvalidRequest unless a batch line may name this endpoint."""
    if endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")


def window_s(text: str) -> int:
    """Parse a completion window into seconds. Raise InvalidRequest."""
    window = _WINDOW.fullmatch(text)
    found_s = int(window[1]) * _UNIT_S[window[2]] if window else 0
    if not 0 < found_s <= MAX_WINDOW_S:
        raise InvalidRequest("completion_window must be like 24h, and up to 7d", param="completion_window")
    return found_s
