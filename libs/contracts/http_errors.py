"""Errors by which HTTP servers refuse a request before a route reads it; see the tree in libs/contracts/errors.py."""

from libs.contracts.errors import AWAY, INVALID, FulcrumError, InvalidRequest


# fmt: off
#                                        wire=(code,                       type,    HTTP, gRPC)
class UnsupportedMediaType(InvalidRequest,
                                         wire=("unsupported_media_type",   INVALID, 415, "INVALID_ARGUMENT")):
    """The body is of another type than the route accepts, or compressed."""
class BodyTooLarge(InvalidRequest,       wire=("body_too_large",           INVALID, 413, "INVALID_ARGUMENT")):
    """The body exceeds the bound of the service that reads it."""
class HeadersTooLarge(InvalidRequest,    wire=("headers_too_large",        INVALID, 431, "INVALID_ARGUMENT")):
    """The request's target, one of its headers, or all of them exceed a bound."""
class RepeatedHeader(InvalidRequest,     wire=("repeated_header",          INVALID, 400, "INVALID_ARGUMENT")):
    """A header with one value was sent twice, and a proxy may have checked the other one."""
class ExpectationFailed(InvalidRequest,  wire=("expectation_failed",       INVALID, 417, "INVALID_ARGUMENT")):
    """The request expects what no service here does."""
class UnsupportedTransferCoding(InvalidRequest,
                                         wire=("unsupported_transfer_encoding", INVALID, 501, "INVALID_ARGUMENT")):
    """The body has another transfer coding than chunked."""
    repeatable = False
class UnsupportedHttpVersion(InvalidRequest,
                                         wire=("unsupported_http_version", INVALID, 505, "INVALID_ARGUMENT")):
    """The request is of another version than HTTP/1.0 or HTTP/1.1."""
    repeatable = False
class RequestTooSlow(InvalidRequest,     wire=("request_too_slow",         INVALID, 408, "INVALID_ARGUMENT")):
    """The client took too long to send its request."""
class TooManyPipelined(InvalidRequest,   wire=("too_many_pipelined",       INVALID, 429, "RESOURCE_EXHAUSTED")):
    """Too many requests wait on one connection. Unanswered ones can be sent again on another."""
class TooManyConnections(FulcrumError,   wire=("too_many_connections",     AWAY,    503, "RESOURCE_EXHAUSTED")):
    """The server has as many connections as it accepts, in all or from one address."""
class WrongHost(InvalidRequest,          wire=("wrong_host",               INVALID, 403, "INVALID_ARGUMENT")):
    """The request is for, or from a page of, a name that this service does not answer to."""
# fmt: on
