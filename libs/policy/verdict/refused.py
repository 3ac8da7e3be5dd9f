"""The verdict that nothing runs although clients call, because most requests are refused for their content."""

from collections.abc import Iterator, Mapping
from typing import Final

from libs.policy.verdict.causes import Cause, CauseCode
from libs.policy.verdict.state import Grade, Threshold

Reason = tuple[int, str]
"""The HTTP status and error code of a refusal."""
# More room would end these, and a full queue or a tenant at its limit has figures of its own.
NO_ROOM: Final = frozenset({429, 503})
REFUSED: Final = Threshold(0.5, 0.35)
"""The share of refused requests that names this cause, and that ends it."""
LEAST_REQUESTS: Final = 8
"""Requests of the window, about one a second over ten, below which a share may be chance."""
NOTHING_ELSE: Final = 0.95
"""The share from which the verdict states that no request is admitted."""
# After every other cause, since those hold up admitted requests.
RANK: Final = 4
MAX_NAMED: Final = 3
MODEL_NOT_FOUND: Final = "model_not_found"
WRONG_HOST: Final = "wrong_host"


def refused_causes(requests: int, refused: Mapping[Reason, int], span_s: float, *, lasting: bool) -> Iterator[Cause]:
    """Yield the cause if it holds or is between its thresholds.

    `requests` have arrived in the last `span_s`. `lasting` is true if some were refused in the last two seconds.
    """
    counts = {reason: count for reason, count in refused.items() if reason[0] not in NO_ROOM}
    total = sum(counts.values())
    if not total or not lasting:
        return
    share = total / max(requests, total)
    grade = min(REFUSED.grade(share), Grade.FIRE if requests >= LEAST_REQUESTS else Grade.HOLD)
    if grade is Grade.CLEAR:
        return
    most = sorted(counts, key=lambda reason: -counts[reason])
    first = "Nothing gets in" if share >= NOTHING_ELSE else "Requests are refused"
    said = f"{first}: {total:,} of {max(requests, total):,} requests in the last {span_s:.0f} s were refused"
    sentence = f"{said}: {_named(most, counts)}. {_check(*most[0])}"
    yield Cause(CauseCode.REFUSED, "", sentence, grade=grade, rank=RANK)


def _named(most: list[Reason], counts: Mapping[Reason, int]) -> str:
    """Format as "403 permission_denied" or "90 with 403 permission_denied, 8 with 404 model_not_found"."""
    if len(most) == 1:
        return _reason(*most[0])
    named = [f"{counts[reason]:,} with {_reason(*reason)}" for reason in most[:MAX_NAMED]]
    more = sum(counts[reason] for reason in most[MAX_NAMED:])
    return ", ".join([*named, *([f"{more:,} for other reasons"] if more else [])])


def _reason(status: int, code: str) -> str:
    return f"{status} {code}" if status else "various errors"


def _check(status: int, code: str) -> str:
    """Return what to check about requests that are refused for this reason."""
    if code == WRONG_HOST:
        return "Check the host name that clients call: FULCRUM_HTTP_HOSTS lists those that are answered."
    if status == 401:
        return "Check the keys that clients send: `fulcrum keys list` shows which there are."
    if status == 403:
        return "Check what the clients' keys may do: `fulcrum keys list` shows their roles and models."
    if code == MODEL_NOT_FOUND:
        return "Check the model that clients name: `GET /v1/models` of the gateway lists those that are served."
    if status in (404, 405):
        return "Check the address that clients call: its path is none of the gateway's."
    return "Check what clients send: each answer says what is wrong with its request."
