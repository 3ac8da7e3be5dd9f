"""Errors of the tree in libs/contracts/errors.py by which HTTP servers refuse a request before a route reads it."""

from typing import ClassVar

from libs.contracts.errors import FulcrumError, GrpcStatus, InvalidRequest


class UnsupportedMediaType(InvalidRequest):
    """A body of another type than the route takes, or a compressed one."""

    code = "unsupported_media_type"
    http_status = 415


class BodyTooLarge(InvalidRequest):
    """The body is over the gateway's bound."""

    code = "body_too_large"
    http_status = 413


class HeadersTooLarge(InvalidRequest):
    """The request's target, one of its headers, or all of them are over a bound."""

    code = "headers_too_large"
    http_status = 431


class RepeatedHeader(InvalidRequest):
    """A header that holds one value came twice: a proxy may have checked the other one."""

    code = "repeated_header"


class ExpectationFailed(InvalidRequest):
    """The request expects what no service here does."""

    code = "expectation_failed"
    http_status = 417


class UnsupportedTransferCoding(InvalidRequest):
    """The body is coded in another way than in chunks."""

    code = "unsupported_transfer_encoding"
    http_status = 501
    repeatable = False


class UnsupportedHttpVersion(InvalidRequest):
    """The request is of another version than HTTP/1.0 or HTTP/1.1."""

    code = "unsupported_http_version"
    http_status = 505
    repeatable = False


class RequestTooSlow(InvalidRequest):
    """The client took too long to send its request."""

    code = "request_too_slow"
    http_status = 408


class TooManyPipelined(InvalidRequest):
    """Too many requests wait on one connection: the ones that were not answered can be sent again on another."""

    code = "too_many_pipelined"
    http_status = 429
    grpc_status: ClassVar[GrpcStatus] = "RESOURCE_EXHAUSTED"


class TooManyConnections(FulcrumError):
    """The server has as many connections as it takes, in all or from one address."""

    code = "too_many_connections"
    error_type = "service_unavailable_error"
    http_status = 503
    grpc_status: ClassVar[GrpcStatus] = "RESOURCE_EXHAUSTED"


class WrongHost(InvalidRequest):
    """The request is for, or from a page of, a name that this service does not answer to."""

    code = "wrong_host"
    http_status = 403
