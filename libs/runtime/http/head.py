"""Checks of a request's head before any route sees it (RFC 9110, RFC 9112). Pure."""

import re
from typing import Final

from libs.contracts.errors import InvalidRequest, quoted
from libs.contracts.http_errors import (
    ExpectationFailed,
    RepeatedHeader,
    UnsupportedHttpVersion,
    UnsupportedTransferCoding,
)

Headers = list[tuple[bytes, bytes]]
"""Headers in ASGI's form: names in lower case, in the order of their lines."""

# Headers that a service acts on and that hold one value. Given twice, a proxy may have read the other one.
SINGLE: Final = frozenset(
    {
        b"access-control-request-method",
        b"authorization",
        b"content-length",
        b"content-type",
        b"cookie",
        b"host",
        b"idempotency-key",
        b"if-modified-since",
        b"if-range",
        b"origin",
        b"range",
        b"x-request-id",
    }
)
# Every header of our own holds one value too.
OWN_PREFIX: Final = b"x-fulcrum-"
# traceparent stands in neither: two of them make no valid one, and W3C has such a request go on under a new trace.

_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")


def check_head(headers: Headers, version: str) -> dict[bytes, bytes]:
    """Return the headers by name. Raise for a head that is ambiguous, or that requests what no service here does.

    Lines of one name become one line in place, as RFC 9110 (5.3) lets a recipient combine them.
    """
    found = dict(headers)
    if len(found) != len(headers):
        found = _combined(headers)
        headers[:] = found.items()
    if version not in ("1.1", "1.0"):
        raise UnsupportedHttpVersion(f"HTTP/{version} is not served: send HTTP/1.1")
    host = found.get(b"host")
    if host is None:
        if version == "1.1":
            raise InvalidRequest("a request of HTTP/1.1 needs the header Host", param="host")
    elif not _HOST.fullmatch(host):
        raise InvalidRequest(f"header host is no name or address: {quoted(host.decode('latin-1'))}", param="host")
    coding = found.get(b"transfer-encoding")
    if coding is not None:
        _check_coding(coding, version)
    expected = found.get(b"expect")
    if expected is not None and any(each != b"100-continue" for each in _members(expected)):
        shown = quoted(expected.decode("latin-1"))
        raise ExpectationFailed(f"expect {shown} is not served: only 100-continue is", param="expect")
    return found


def _combined(headers: Headers) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in found:
            found[name] = value
        elif name in SINGLE or name.startswith(OWN_PREFIX):
            shown = name.decode("latin-1")
            raise RepeatedHeader(f"header {shown} came more than once: send it once", param=shown)
        else:
            found[name] += b", " + value
    return found


def _check_coding(value: bytes, version: str) -> None:
    codings = _members(value)
    if version != "1.1":
        raise InvalidRequest(f"HTTP/{version} has no transfer-encoding", param="transfer-encoding")
    if not codings or codings[-1] != b"chunked":
        raise InvalidRequest("transfer-encoding must end with chunked", param="transfer-encoding")
    if len(codings) > 1:
        shown = quoted(value.decode("latin-1"))
        raise UnsupportedTransferCoding(
            f"transfer-encoding {shown} is not served: send the body chunked alone, uncompressed",
            param="transfer-encoding",
        )


def _members(value: bytes) -> list[bytes]:
    """Return the members of a comma-separated list, in lower case."""
    return [each for each in (part.strip().lower() for part in value.split(b",")) if each]
