"""Tests of images in a response's input: their translation, and the field that errors name."""

from typing import Any

import msgspec
import pytest

from libs.contracts.errors import InvalidRequest
from services.gateway.images.files import SentImage
from services.gateway.request.parse import ParsedRequest
from services.gateway.responses.request import build_response_request, parse_response

PNG, ADDRESS = "data:image/png;base64,AAAA", "https://example.com/a.png"


def image(url: str = PNG, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **fields}


def text(of: str) -> dict[str, Any]:
    return {"type": "input_text", "text": of}


def parsed_content(
    *content: dict[str, Any], role: str = "user", earlier: list[dict[str, Any]] | None = None
) -> ParsedRequest:
    body = msgspec.json.encode({"model": "m", "input": [{"role": role, "content": list(content)}]})
    return build_response_request(parse_response(body), earlier or [], "resp_1", 0).parsed


def test_images_become_parts_beside_the_texts_and_errors_name_the_clients_field() -> None:
    found = parsed_content(image(detail="high"), text("a"), image(ADDRESS), text("b"))
    content = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert list(found.messages) == [{"role": "user", "content": content}]
    named = ("input[0].content[0].image_url", "input[0].content[2].image_url")
    assert found.images == (SentImage(PNG, named[0]), SentImage(ADDRESS, named[1]))


def test_input_without_images_stays_one_text() -> None:
    assert parsed_content(text("a"), text("b")).messages[0]["content"] == "ab"


def test_images_of_earlier_responses_are_named_by_previous_response_id() -> None:
    before = [{"role": "user", "content": [image()]}, {"role": "assistant", "content": "yes"}]
    found = parsed_content(text("and?"), image(ADDRESS), earlier=before)
    assert [each.field for each in found.images] == ["previous_response_id", "input[0].content[1].image_url"]
    assert [each.url for each in found.images] == [PNG, ADDRESS]


@pytest.mark.parametrize(
    ("part", "role", "param"),
    [
        ({"type": "input_image"}, "user", "input[0].content[0].image_url"),
        ({"type": "input_image", "file_id": "f"}, "user", "input[0].content[0]"),
        (image(text="a"), "user", "input[0].content[0].text"),
        ({"type": "input_text"}, "user", "input[0].content[0].text"),
        ({**text("a"), "image_url": PNG}, "user", "input[0].content[0].image_url"),
        ({"type": "input_file", "text": "a"}, "user", "input[0].content[0].type"),
        (image(), "assistant", "input[0].content[0].type"),
        (image(), "system", "input[0].content[0].type"),
    ],
)
def test_an_invalid_part_of_a_message_is_refused_by_name(part: dict[str, Any], role: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed_content(part, role=role)
    assert caught.value.param == param
