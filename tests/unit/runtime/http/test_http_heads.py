"""Tests that ambiguous request heads are refused before any route, by every service's server."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import FulcrumError, RepeatedHeader
from libs.runtime.http.connection import SINGLE, check_head
from tests.unit.runtime.http.http_rig import exchange

CLOSE = b"connection: close\r\n"
HOST = b"host: x\r\n"
CHUNKS = b"3\r\nabc\r\n0\r\n\r\n"
ONCE = (
    b"access-control-request-method", b"authorization", b"content-type", b"cookie", b"idempotency-key",
    b"if-modified-since", b"if-range", b"origin", b"range", b"x-api-key", b"x-request-id",
)  # fmt: skip
"""Repeated here, so that a header dropped from SINGLE by mistake is noticed."""
OWN = (b"x-fulcrum-tenant", b"x-fulcrum-class", b"x-fulcrum-details", b"x-fulcrum-ttft-deadline-ms")


async def heads(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the received headers and body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    shown = b"".join(b"%b=%b;" % header for header in scope["headers"] if header[0] != b"connection") + body
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(shown))]})
    await send({"type": "http.response.body", "body": shown})


def answer(line: bytes, *headers: bytes, body: bytes = b"") -> tuple[int, str]:
    """Return status and body of the answer to a request with these header lines."""
    sent = line + b"\r\n" + b"".join(each + b"\r\n" for each in headers) + CLOSE + b"\r\n" + body
    head, _, shown = exchange(heads, sent).partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1.1 (\d{3}) ", head)
    assert found is not None, head
    return int(found[1]), shown.decode()


def code(found: tuple[int, str]) -> tuple[int, str, str | None]:
    error = json.loads(found[1])["error"]
    return found[0], error["code"], error["param"]


@pytest.mark.system
@pytest.mark.parametrize("name", sorted({*SINGLE, *ONCE, *OWN} - {b"host", b"content-length"}))
def test_a_header_that_a_service_acts_on_may_be_sent_only_once(name: bytes) -> None:
    twice = answer(b"GET / HTTP/1.1", b"host: x", name + b": a", b"x-other: 1", name.title() + b": a")
    assert code(twice) == (400, "repeated_header", name.decode())
    assert answer(b"GET / HTTP/1.1", b"host: x", name + b": a") == (200, f"host=x;{name.decode()}=a;")


@pytest.mark.system
def test_lists_may_be_sent_in_several_lines_and_are_read_as_one() -> None:
    found = answer(b"GET / HTTP/1.1", b"host: x", b"accept: a", b"x: 1", b"accept: b", b"content-encoding: gzip")
    assert found == (200, "host=x;accept=a, b;x=1;content-encoding=gzip;")


@pytest.mark.system
@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        (b"GET / HTTP/1.1", (), 400),
        (b"GET / HTTP/1.0", (), 200),
        (b"GET / HTTP/1.1", (b"host: x", b"host: x"), 400),
        (b"GET / HTTP/1.0", (b"host: x", b"Host: y"), 400),
        (b"GET / HTTP/1.1", (b"host: a, b",), 400),
        (b"GET / HTTP/1.1", (b"host: a/b",), 400),
        (b"GET / HTTP/1.1", (b"host: user@a",), 400),
        (b"GET / HTTP/1.1", (b"host:",), 200),
        (b"GET / HTTP/1.1", (b"host: [::1]:8000",), 200),
        (b"GET / HTTP/1.1", (b"host: a_b.example:80",), 200),
        (b"GET http://x/ HTTP/1.1", (), 400),
    ],
)
def test_a_request_names_exactly_one_host(line: bytes, headers: tuple[bytes, ...], status: int) -> None:
    found = answer(line, *headers)
    assert found[0] == status
    if status == 400:
        assert code(found)[2] == "host"


@pytest.mark.system
def test_the_host_of_an_absolute_target_precedes_the_header() -> None:
    assert answer(b"GET http://real:81/ HTTP/1.1", b"host: other") == (200, "host=real:81;")
    assert answer(b"GET http://[::1]/ HTTP/1.1", b"host: other") == (200, "host=[::1];")
    assert code(answer(b"GET http://real/ HTTP/1.1", b"host: a", b"host: a"))[0] == 400


@pytest.mark.system
@pytest.mark.parametrize(
    ("codings", "status"),
    [
        ([b"chunked"], 200),
        ([b"Chunked"], 200),
        ([b"gzip, chunked"], 501),
        ([b"gzip", b"chunked"], 501),
        ([b"deflate , gzip,chunked"], 501),
        ([b"gzip"], 400),
        ([b"identity"], 400),
        ([b"chunked, gzip"], 400),
        ([b"chunked, chunked"], 400),
        ([b"chunked", b"chunked"], 400),
        ([b"xchunked"], 400),
        ([b""], 400),
    ],
)
def test_chunked_is_the_only_accepted_transfer_encoding(codings: list[bytes], status: int) -> None:
    lines = [b"transfer-encoding: " + each for each in codings]
    found = answer(b"POST / HTTP/1.1", b"host: x", *lines, body=CHUNKS)
    assert found[0] == status
    if status == 501:
        assert code(found) == (501, "unsupported_transfer_encoding", "transfer-encoding")
    elif status == 200:
        assert found[1].endswith(";abc")


@pytest.mark.system
@pytest.mark.parametrize(
    ("line", "headers", "expected"),
    [
        (b"POST / HTTP/1.0", (b"host: x", b"transfer-encoding: chunked"), (400, "invalid_request")),
        (b"POST / HTTP/1.1", (b"host: x", b"content-length: 3", b"content-length: 3"), (400, "invalid_request")),
        (b"POST / HTTP/1.1", (b"host: x", b"content-length: 3, 3"), (400, "invalid_request")),
        (
            b"POST / HTTP/1.1",
            (b"host: x", b"content-length: 3", b"transfer-encoding: chunked"),
            (400, "invalid_request"),
        ),
        (b"GET / HTTP/2.0", (b"host: x",), (505, "unsupported_http_version")),
        (b"GET / HTTP/0.9", (b"host: x",), (505, "unsupported_http_version")),
    ],
)
def test_a_body_must_have_one_length_and_a_request_a_supported_version(
    line: bytes, headers: tuple[bytes, ...], expected: tuple[int, str]
) -> None:
    assert code(answer(line, *headers, body=b"abc"))[:2] == expected


@pytest.mark.system
@pytest.mark.parametrize("value", [b"200-ok", b"100-continue, other", b"100-continue;a=b"])
def test_an_unknown_expectation_is_417(value: bytes) -> None:
    found = answer(b"POST / HTTP/1.1", b"host: x", b"expect: " + value, b"content-length: 3", body=b"abc")
    assert code(found) == (417, "expectation_failed", "expect")


@pytest.mark.system
def test_an_interim_answer_is_sent_only_to_clients_that_expect_and_support_it() -> None:
    lines = HOST + b"expect: 100-Continue\r\ncontent-length: 3\r\n" + CLOSE + b"\r\n"
    assert exchange(heads, b"POST / HTTP/1.1\r\n" + lines + b"abc").startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert exchange(heads, b"POST / HTTP/1.0\r\n" + lines + b"abc").startswith(b"HTTP/1.1 200 ")
    twice = lines.replace(HOST, HOST + b"expect: 100-continue\r\n")
    assert exchange(heads, b"POST / HTTP/1.1\r\n" + twice + b"abc").startswith(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.system
def test_a_refused_head_waits_for_earlier_answers_and_closes_the_connection() -> None:
    wrong = b"POST / HTTP/1.1\r\nhost: x\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
    after = b"GET /after HTTP/1.1\r\nhost: x\r\n\r\n"
    found = exchange(heads, b"GET / HTTP/1.1\r\n" + HOST + b"\r\n" + wrong + after)
    assert re.findall(rb"HTTP/1.1 (\d+) ", found) == [b"200", b"400"]
    assert found.count(b"connection: close") == 1


@pytest.mark.system
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"HEAD / HTTP/1.1\r\n\r\n", b"400"),
        (b"HEAD / HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 17_000 + b"\r\n\r\n", b"431"),
    ],
    ids=["no host", "a header over a bound"],
)
def test_a_refusal_of_head_has_no_body(sent: bytes, status: bytes) -> None:
    head, _, body = exchange(heads, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status + b" ") and body == b""
    assert int(re.search(rb"content-length: (\d+)", head)[1]) > 0  # type: ignore[index]


# ------------------------------------------------------------ the decision itself

names = st.sampled_from([b"accept", b"authorization", b"x-fulcrum-tenant", b"traceparent", b"via", b"x"])
lines = st.lists(st.tuples(names, st.sampled_from([b"a", b"b", b""])), max_size=8)


@given(lines)
def test_parsed_headers_have_each_name_once_with_all_of_its_values(found: list[tuple[bytes, bytes]]) -> None:
    headers = [(b"host", b"x"), *found]
    counts = {name: sum(each == name for each, _ in found) for name, _ in found}
    if any(counts.get(name, 0) > 1 for name in (b"authorization", b"x-fulcrum-tenant")):
        with pytest.raises(RepeatedHeader):
            check_head(headers, "1.1")
        return
    by_name = check_head(headers, "1.1")
    assert dict(headers) == by_name and len(headers) == len(by_name)
    for name in counts:
        assert by_name[name] == b", ".join(value for each, value in found if each == name)


@given(st.binary(max_size=12), st.sampled_from([b"host", b"expect", b"transfer-encoding"]))
def test_any_bytes_are_accepted_or_refused(value: bytes, name: bytes) -> None:
    try:
        check_head([(b"host", b"x")] * (name != b"host") + [(name, value)], "1.1")
    except FulcrumError as error:
        assert error.http_status in (400, 417, 501)
        assert error.param == name.decode()
