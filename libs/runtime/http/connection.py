"""One client's connection: uvicorn's protocol over httptools, within bounds.

It closes the following gaps of uvicorn 0.54. Bodies behind an ignored `Upgrade` are dropped, and what follows is
read as another request. Heads are unbounded in size and time, and pipelined requests in number. HTTP/1.0 clients
get chunks. The pipelined requests of a client that has gone still run. httptools accepts heads that two readers
could take differently: two `Host`s or none, `gzip, chunked`, HTTP/2.0 and any `Expect`.
"""

import asyncio
import http
import re
from typing import Any, Final

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from libs.contracts.errors import (
    ExpectationFailed,
    FulcrumError,
    HeadersTooLarge,
    InvalidRequest,
    RepeatedHeader,
    RequestTooSlow,
    TooManyPipelined,
    UnsupportedHttpVersion,
    UnsupportedTransferCoding,
    quoted,
)
from libs.runtime.http.settings import ConnectionGuard

Headers = list[tuple[bytes, bytes]]
"""Headers in ASGI's form: names in lower case, in the order of their lines."""

# Headers with a single value on which a service acts. If one is repeated, a proxy may have read the other value.
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
        b"x-api-key",
        b"x-request-id",
    }
)
# Fulcrum's own headers also have a single value.
OWN_PREFIX: Final = b"x-fulcrum-"
# traceparent is in neither, because two of them are invalid, and by W3C such a request continues under a new trace.

_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")


def check_head(headers: Headers, version: str) -> dict[bytes, bytes]:
    """Return the headers by name. Raise for a head that is ambiguous, or that requests an unsupported feature.

    Lines of one name are combined into the first, as RFC 9110 (5.3) allows.
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
        raise InvalidRequest(f"header host is not a name or address: {quoted(host.decode('latin-1'))}", param="host")
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
            raise RepeatedHeader(f"header {shown} was sent more than once: send it once", param=shown)
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


class HeadWithBody(asyncio.Transport):
    """A transport for one response that sends its head together with the first part of its body.

    The head leaves alone only if nothing follows in the same turn of the loop. uvicorn always writes it separately,
    which costs a system call and wakes the client needlessly.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        """The head while it is held back; empty once it has been sent, None before it has been written."""

    def write(self, data: Any) -> None:
        # uvicorn writes the head in the first call.
        if self._head is None:
            self._head = data
            self._loop.call_soon(self._flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


class UnframedCycle(RequestResponseCycle):
    """A response to an HTTP/1.0 client, which does not support chunks. Without a length, it ends with its
    connection.
    """

    _to_the_end = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._to_the_end = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if self._to_the_end:
                self.chunked_encoding = False  # set, so that no chunks are chosen
        elif self._to_the_end:
            self.expected_content_length = len(message.get("body", b""))  # of this part; the total is unknown
        await super().send(message)


def refusal(error: FulcrumError, *, to_head: bool = False, shown: object = None) -> bytes:
    """Return a whole response, after which the connection ends.

    `shown` is its body, instead of the common form of errors. A response to HEAD has no body.
    """
    body = msgspec.json.encode(error.http_body if shown is None else shown)
    head = f"HTTP/1.1 {error.http_status} {http.HTTPStatus(error.http_status).phrase}\r\n"
    own = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = (f"{name}: {value}\r\n" for name, value in (own | error.http_headers).items())
    return f"{head}{''.join(lines)}\r\n".encode() + (b"" if to_head else body)


_FRAMING = (b"content-length", b"transfer-encoding")


class Connection(HttpToolsProtocol):
    """A connection that answers malformed or oversized requests with an error, and cancels all requests of a lost
    client.

    Errors have the shape of the API's. `sweep` enforces the bounds on time.
    """

    def __init__(self, *args: Any, guard: ConnectionGuard, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guard = guard
        self._bounds = guard.bounds
        self._cycles: list[RequestResponseCycle] = []
        """Requests without a complete response: at most one that runs, and those that wait."""
        self._refused = False
        self._refusal: FulcrumError | None = None
        """A refusal to send once the earlier requests have their responses."""
        self._lingers_until_s: float | None = None
        self._in_head = False
        self._in_body = False
        """True if the input is between the end of a request's headers and its own end."""
        self._head_bytes = 0
        self._unmoved_bytes = 0
        """The bytes read since the last end of headers, part of a body, or end of a request."""
        self._awaited_s: float | None = None
        """The time since which the end of a head has been awaited; None if no part of one has arrived."""
        self._received_s = 0.0
        self._framing: list[tuple[bytes, bytes]] = []
        """Headers that give the length of the body behind an ignored upgrade."""
        self._replaying = False
        """True if the parser reads a synthetic head for such a body."""

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, or refuse it at once if it is one too many."""
        super().connection_made(transport)
        self._received_s = self._awaited_s = self.loop.time()
        error = self._guard.enter(self._address)
        if error is not None:
            self._refused = True
            self._guard.count_refusal(error)
            transport.write(refusal(error))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel everything that the client has requested."""
        self._guard.leave(self._address)
        self._give_up()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse input. Input of a refused client is discarded."""
        if self._refused:
            return
        self._received_s = self.loop.time()
        if self._awaited_s is None and not self._in_body:
            self._awaited_s = self._received_s
        self._unset_keepalive_if_required()
        self._unmoved_bytes += len(data)
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    data = self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, FulcrumError):
                self._refuse(error.__context__)
            else:
                self._break_off(InvalidRequest("Invalid HTTP request received."))
            return
        if self._unmoved_bytes > self._bounds.max_head_bytes:
            too_large = HeadersTooLarge(f"headers are over {self._bounds.max_head_bytes} bytes")
            (self._break_off if self._in_body else self._refuse)(too_large)

    def sweep(self, now_s: float) -> None:
        """End requests that have taken too long at `now_s`, the loop's time."""
        bounds = self._bounds
        if self._lingers_until_s is not None:
            if now_s > self._lingers_until_s:
                self.transport.abort()
        elif self._answering:
            if self._in_body and not self.flow.read_paused and now_s > self._received_s + bounds.body_s:
                self._break_off(RequestTooSlow(f"nothing of the body came for {bounds.body_s:g} s"))
        elif self._awaited_s is not None and now_s > self._awaited_s + bounds.head_s:
            if self._in_head or self._unmoved_bytes:
                self._refuse(RequestTooSlow(f"the headers did not end within {bounds.head_s:g} s"))
            else:
                self.transport.close()
        elif now_s > self._received_s + bounds.idle_s:
            self.transport.close()

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def _answering(self) -> bool:
        return bool(self.pipeline) or not (self.cycle is None or self.cycle.response_complete)

    # ------------------------------------------------------------ the parser's callbacks

    def on_message_begin(self) -> None:
        """Start a request. Raise TooManyPipelined, which ends parsing."""
        if self._replaying:
            return
        if len(self.pipeline) >= self._bounds.max_pipelined:
            raise TooManyPipelined(
                f"{self._bounds.max_pipelined} requests wait on this connection already: send the rest on another one"
            )
        self._in_head, self._in_body = True, False
        self._head_bytes = 0
        if self._awaited_s is None:
            self._awaited_s = self._received_s
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Read a part of the target. Raise HeadersTooLarge."""
        if self._replaying:
            return
        super().on_url(url)
        if len(self.url) > self._bounds.max_line_bytes:
            raise HeadersTooLarge(f"the request's target is over {self._bounds.max_line_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header. Raise HeadersTooLarge. Trailers are dropped, since no service here requests any."""
        if self._replaying or self._in_body:
            return
        size_bytes = len(name) + len(value)
        if size_bytes > self._bounds.max_line_bytes:
            shown = name[:64].decode("latin-1")
            raise HeadersTooLarge(f"header {shown} is over {self._bounds.max_line_bytes} bytes")
        self._head_bytes += size_bytes
        if self._head_bytes > self._bounds.max_head_bytes:
            raise HeadersTooLarge(f"headers are over {self._bounds.max_head_bytes} bytes")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind earlier ones. Raise the errors of `check_head`."""
        if self._replaying:
            self._replaying = False
            return
        self._settle_head()
        self._unmoved_bytes = 0
        self._awaited_s = None
        self._in_head, self._in_body = False, True
        if self.parser.should_upgrade():
            self._framing = [(name, value) for name, value in self.headers if name in _FRAMING]
        super().on_headers_complete()
        cycle = self.cycle
        if self.scope["http_version"] == "1.0":
            cycle.__class__ = UnframedCycle  # it has not run yet, and uvicorn creates no other kind
        cycle.transport = HeadWithBody(self.transport, self.loop)
        self._cycles = [each for each in self._cycles if not each.response_complete]
        self._cycles.append(cycle)

    def _settle_head(self) -> None:
        """Check the head and normalise its `Expect` and `Host`. Raise the errors of `check_head`."""
        version = self.parser.get_http_version()
        found = check_head(self.headers, version)
        # uvicorn reads each line separately and ignores the version; HTTP/1.0 has no interim answers (RFC 9110,
        # 10.1.1).
        self.expect_100_continue = b"expect" in found and version == "1.1"
        if not self.url.startswith(b"/"):
            target = httptools.parse_url(self.url)
            if target.host:  # it replaces Host regardless of its value (RFC 9112, 3.2.2)
                name = b"[%b]" % target.host if b":" in target.host else target.host
                found[b"host"] = name if target.port is None else b"%b:%d" % (name, target.port)
                self.headers[:] = found.items()

    def on_body(self, body: bytes) -> None:
        self._unmoved_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request, unless its body is still to be read behind an ignored upgrade."""
        if self._framing:
            return
        self._unmoved_bytes = 0
        self._in_body = False
        self._awaited_s = None
        super().on_message_complete()

    def _ignore_upgrade(self, rest: bytes) -> bytes:
        """Return the bytes to parse instead of `rest`, to continue in HTTP/1.1 as a server may (RFC 9110, 7.8).

        The parser treats the bytes after the head as another protocol's. A new parser reads the body, after a
        synthetic head with the body's length.
        """
        framing, self._framing = self._framing, []
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        if not framing:
            return rest
        self._replaying = True
        return b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % header for header in framing) + b"\r\n" + rest

    # ------------------------------------------------------------ answers and refusals

    def on_response_complete(self) -> None:
        """Proceed to the next request, or send the refusal that follows all of them."""
        super().on_response_complete()
        self._received_s = self.loop.time()
        if self._awaited_s is not None or self._in_body:  # an answer may arrive before the end of its request
            self._awaited_s = self._received_s
        if self._refusal is not None and not self._answering:
            self._answer_refusal(self._refusal, to_head=self._reads_head())

    def send_400_response(self, msg: str) -> None:
        # uvicorn calls it.
        self._break_off(InvalidRequest(msg))

    def _refuse(self, error: FulcrumError) -> None:
        """Stop reading, and send this refusal after the earlier responses."""
        self._refused = True
        self._guard.count_refusal(error)
        if self._answering:
            self._refusal = error
        else:
            self._answer_refusal(error, to_head=self._reads_head())

    def _break_off(self, error: FulcrumError) -> None:
        """Stop reading and cancel earlier requests, because the client's input is malformed or stalled."""
        self._refused = True
        self._guard.count_refusal(error)
        waiting = [cycle for cycle in self._cycles if not cycle.response_complete]
        begun = any(cycle.response_started for cycle in waiting)
        to_head = waiting[0].scope["method"] == "HEAD" if waiting else self._reads_head()
        self._give_up()
        if begun:
            self.transport.close()
        else:
            self._answer_refusal(error, to_head=to_head)

    def _reads_head(self) -> bool:
        """Return whether the request being read is a HEAD, whose response has no body."""
        return self._in_head and bool(self.parser.get_method() == b"HEAD")

    def _path(self) -> str:
        """Return the path of the request that was read last; empty before the first one."""
        target: bytes = getattr(self, "url", b"")
        return target.partition(b"?")[0].decode("latin-1")

    def _answer_refusal(self, error: FulcrumError, *, to_head: bool) -> None:
        self._refusal = None
        if self.transport.is_closing():
            return
        shown = self._guard.error_body(error, self._path())
        self.transport.write(refusal(error, to_head=to_head, shown=shown))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._lingers_until_s = self.loop.time() + self._bounds.linger_s

    def _give_up(self) -> None:
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()
        self.pipeline.clear()
