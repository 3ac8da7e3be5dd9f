"""Fuzz tests of HTTP: an answer that the API describes, soon, and never an internal error."""

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from libs.testing.suites.suite import RunningSuite
from services.gateway.embeddings.schema import RERANK_PATHS, SCORE_PATHS

pytestmark = pytest.mark.suite

ANSWER_S = 20.0
PLAN_S = 120.0
"""A capacity plan measures new traffic in the lab, niced, in a process that starts with the first plan."""
MAX_TOKENS = 64
"""Longer answers only cost time."""
WITHOUT_TOKENS = ("/v1/embeddings", *SCORE_PATHS, *RERANK_PATHS)
"""Routes that generate no tokens, and have no bound on them."""
UNAVAILABLE = (429, 503)
NOT_READY = ({"ready", "models"}, {"status", "reason"})
"""The answers to readiness probes, which are no errors."""
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
"""`check` refuses errors of a service, but those that say when to come back: a metrics service without a planner."""


def operations(url: str) -> Iterator[Any]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        yield found.ok()


def cases(operation: Any, mode: GenerationMode) -> st.SearchStrategy[Case]:
    """Cases of one operation, most of them steered past the checks that would end them all at once."""
    return st.builds(_steered, operation.as_strategy(generation_mode=mode), st.integers(0, 9))


def _steered(case: Case, luck: int) -> Case:
    if luck and case.headers:
        case.headers = {name: value for name, value in case.headers.items() if not name.lower().startswith("x-")}
    if luck and isinstance(case.body, dict):
        case.body["model"] = "sim"
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], MAX_TOKENS)
        if case.path not in WITHOUT_TOKENS and not {"max_tokens", "max_completion_tokens"} & case.body.keys():
            case.body["max_tokens"] = luck
    return case


def check(status: int, text: str, headers: Mapping[str, str]) -> None:
    assert status < 500 or status in UNAVAILABLE, f"{status} {text}"
    assert "Traceback" not in text
    if status < 400:
        return
    body = json.loads(text)
    if status == 503 and set(body) in NOT_READY:
        return
    error = body["error"]
    assert error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}
    if status in UNAVAILABLE:
        assert int(headers["retry-after"]) >= 1, text


@pytest.mark.parametrize("service", ["gateway", "planner", "metrics"])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fitting", "unfitting"])
def test_every_operation_answers_as_described(
    live_suite: RunningSuite, fuzz: Any, service: str, mode: GenerationMode
) -> None:
    with httpx.Client(timeout=ANSWER_S) as client:
        for operation in operations(live_suite.ready[service]):

            @fuzz.settings()
            @given(case=cases(operation, mode))
            def answers(case: Case) -> None:
                response = case.call(timeout=PLAN_S if case.path == "/v1/capacity" else ANSWER_S)
                fuzz.counts[f"{service} {case.method} {case.path}: {response.status_code}"] += 1
                headers = {name: values[0] for name, values in response.headers.items()}
                check(response.status_code, response.text, headers)
                case.validate_response(response, checks=CHECKS)

            try:
                answers()
            except Unsatisfiable as error:  # no value can be wrong if none is accepted
                assert mode is GenerationMode.NEGATIVE, error
        assert client.get(f"{live_suite.ready[service]}/healthz").status_code == 200


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"model": "sim", "prompt": "hi", "max_tokens": 2}).encode()
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
pieces = st.sampled_from(
    [HEAD, BODY, b"\r\n", b"\r\n\r\n", b"content-length: 99999999999999999999\r\n", b"\x00", WHOLE]
)
pieces |= st.sampled_from([b"transfer-encoding: chunked\r\n", b"expect: 100-continue\r\n", b"upgrade: websocket\r\n"])
pieces |= st.sampled_from([b"GET /%ff%00/../ HTTP/9.9\r\n\r\n", b"FFFFFFFFFFFFFFFFF\r\n", b"x" * 70_000])
pieces |= st.binary(max_size=40)


@pytest.mark.parametrize("service", ["gateway", "planner", "metrics"])
def test_bytes_that_are_not_a_request_are_refused(live_suite: RunningSuite, fuzz: Any, service: str) -> None:
    where = urlsplit(live_suite.ready[service])

    @fuzz.settings(4)
    @given(sent=st.lists(pieces, min_size=1, max_size=5).map(b"".join))
    def refused(sent: bytes) -> None:
        with socket.create_connection((where.hostname, where.port), timeout=ANSWER_S) as connection:
            answer = exchange(connection, sent)
        status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
        fuzz.counts[f"{service} raw bytes: {status or 'closed without an answer'}"] += 1
        head, _, body = answer.partition(b"\r\n\r\n")
        if status >= 400 and b"transfer-encoding" not in head.lower():
            check(status, body.partition(b"HTTP/1.1")[0].decode(), headers_of(head))

    refused()


def headers_of(head: bytes) -> dict[str, str]:
    """Return the headers by lower-case name."""
    pairs = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return {name.decode("latin-1").lower(): value.decode("latin-1").strip() for name, _, value in pairs}


def exchange(connection: socket.socket, sent: bytes) -> bytes:
    """Return the bytes until the server closes, which it does once nothing more can come."""
    answer = b""
    try:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            answer += part
    except (ConnectionError, OSError):
        pass
    return answer


def test_unknown_paths_and_methods_are_answered_in_the_same_shape(live_suite: RunningSuite) -> None:
    for service in ("gateway", "planner", "metrics"):
        for method, path, status in (("GET", "/nowhere", 404), ("POST", "/healthz", 405), ("DELETE", "/metrics", 405)):
            response = httpx.request(method, live_suite.ready[service] + path)
            assert response.status_code == status
            check(status, response.text, response.headers)
