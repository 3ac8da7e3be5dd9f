"""The request headers: identity, tenant, class and latency targets. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from libs.contracts.classes import DEFAULT_CLASS
from libs.contracts.errors import InvalidRequest
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import RequestContext
from libs.keys.book import ANY
from libs.keys.table import ANYBODY, CLASS_HEADER, TENANT_HEADER, Caller, named_in

MAX_TARGET_MS = 24 * 3_600_000

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Defaults:
    """The values of absent headers, and the lower bounds of latency targets."""

    gateway_id: str
    ttft_deadline_ms: float
    tpot_target_ms: float
    tightest: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The lowest TTFT and TPOT in ms by class (ANY for all others). Lower requested values are raised to these."""


@dataclass(frozen=True, slots=True)
class Headers:
    request_id: str
    """The client's id of the request; empty if it sent none."""
    tenant: str
    service_class: str
    ttft_deadline_ms: float | None
    tpot_target_ms: float | None
    traceparent: str
    details: bool

    def context(self, arrival_ns: int, defaults: Defaults) -> RequestContext:
        """Return the context that accompanies the request on every hop."""
        bounds = defaults.tightest
        least_ttft_ms, least_tpot_ms = bounds.get(self.service_class) or bounds.get(ANY) or (0.0, 0.0)
        ttft_ms = max(self.ttft_deadline_ms or defaults.ttft_deadline_ms, least_ttft_ms)
        tpot_ms = max(self.tpot_target_ms or defaults.tpot_target_ms, least_tpot_ms)
        return RequestContext(
            tenant=self.tenant,
            service_class=self.service_class,
            arrival_unix_ns=arrival_ns,
            ttft_deadline_unix_ns=arrival_ns + int(ttft_ms * 1e6),
            tpot_target_us=max(int(tpot_ms * 1000), 1),
            gateway_id=defaults.gateway_id,
            traceparent=self.traceparent,
        )


def read_headers(found: Mapping[bytes, bytes], caller: Caller = ANYBODY) -> Headers:
    """Parse headers, keyed by lowercase name as in ASGI.

    Raise InvalidRequest that names the header, or PermissionDenied for a tenant or class that is not the caller's.
    """
    traceparent = found.get(b"traceparent", b"").decode("latin-1")
    return Headers(
        request_id=_request_id(found),
        tenant=caller.tenant_of(named_in(found, TENANT_HEADER)),
        service_class=caller.class_of(named_in(found, CLASS_HEADER), DEFAULT_CLASS),
        ttft_deadline_ms=_milliseconds(found, "x-fulcrum-ttft-deadline-ms"),
        tpot_target_ms=_milliseconds(found, "x-fulcrum-tpot-target-ms"),
        # W3C: who cannot read it goes on without.
        traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
        details=found.get(b"x-fulcrum-details") == b"1",
    )


def _request_id(found: Mapping[bytes, bytes]) -> str:
    if b"x-request-id" not in found:
        return ""
    value = found[b"x-request-id"].decode("latin-1")
    if not _REQUEST_ID.fullmatch(value):
        raise InvalidRequest(f"header x-request-id must match {_REQUEST_ID.pattern}", param="x-request-id")
    return value


def _milliseconds(found: Mapping[bytes, bytes], name: str) -> float | None:
    value = found.get(name.encode())
    if value is None:
        return None
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds <= MAX_TARGET_MS:
        raise InvalidRequest(f"header {name} must be milliseconds, above 0 and up to {MAX_TARGET_MS}", param=name)
    return milliseconds
