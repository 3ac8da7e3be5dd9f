"""Tests of which bodies are read at all."""

import pytest

from libs.contracts.errors import UnsupportedMediaType
from libs.runtime.http.semantics import check_encoding, check_json

TAKEN = [
    b"application/json",
    b"application/json; charset=utf-8",
    b"Application/JSON;charset=UTF-8",
    b" application/json ",
    b"application/vnd.api+json",
]
REFUSED = [b"", b"text/plain", b"text/plain; application/json", b"multipart/form-data", b"application/jsonp", b"json"]


@pytest.mark.parametrize("kind", TAKEN)
def test_json_is_accepted_in_any_case_and_with_parameters(kind: bytes) -> None:
    check_json({b"content-type": kind})


@pytest.mark.parametrize("kind", REFUSED)
def test_a_body_not_declared_as_json_is_refused_with_the_header_to_send(kind: bytes) -> None:
    with pytest.raises(UnsupportedMediaType, match="send the header content-type: application/json") as caught:
        check_json({b"content-type": kind} if kind else {})
    assert (caught.value.http_status, caught.value.code) == (415, "unsupported_media_type")
    assert caught.value.param == "content-type"
    assert kind.decode() in caught.value.message


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"GZIP", b"identity, gzip", b"x" * 10_000])
def test_a_compressed_body_is_refused_with_its_own_message(encoding: bytes) -> None:
    headers = {b"content-type": b"application/json", b"content-encoding": encoding}
    with pytest.raises(UnsupportedMediaType, match="uncompressed") as caught:
        check_json(headers)
    assert caught.value.param == "content-encoding"
    assert len(caught.value.message) < 300
    with pytest.raises(UnsupportedMediaType):
        check_encoding(headers)


@pytest.mark.parametrize("encoding", [b"identity", b"Identity", b""])
def test_content_encoding_identity_is_accepted(encoding: bytes) -> None:
    check_json({b"content-type": b"application/json", b"content-encoding": encoding})
