"""Images of a request: the files that are taken, and the sentence for each that is not."""

import io
from base64 import b64encode

import pytest
from PIL import Image

from libs.contracts.errors import InvalidRequest, UnsupportedField
from libs.contracts.hashing import image_hash
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.model.vision import Vision, expand
from services.gateway.request.images import (
    MAX_TOTAL_BYTES,
    ImageLimits,
    SentImage,
    check_count,
    check_vision,
    check_workers,
    expanded,
    place_images,
    read_images,
)

FIELD = "messages[0].content[0].image_url.url"
VISION = Vision(token_id=9, image_tokens=3)
LIMITS = ImageLimits(max_images=2, max_bytes=20_000, max_pixels=10_000)


def picture(form: str = "PNG", width: int = 20, height: int = 10) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(file, form)
    return file.getvalue()


def sent(file: bytes, kind: str = "image/png") -> SentImage:
    return SentImage(f"data:{kind};base64,{b64encode(file).decode()}", FIELD)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_of_known_formats_come_through_unchanged_whatever_type_is_named(form: str) -> None:
    file = picture(form)
    assert read_images([sent(file), sent(file, "image/jpeg")], LIMITS) == [file, file]


@pytest.mark.parametrize(
    ("image", "error", "reason"),
    [
        (SentImage("https://example.com/fox.png", FIELD), UnsupportedField, "images are not fetched from addresses"),
        (SentImage("data:text/plain;base64,AAAA", FIELD), InvalidRequest, "only images in data URLs are served"),
        (SentImage("data:image/png;base64,A", FIELD), InvalidRequest, "is not base64"),
        (sent(b""), InvalidRequest, "not an image in a known format"),
        (sent(picture("TIFF")), InvalidRequest, "send PNG, JPEG, WEBP, GIF"),
        (sent(picture()[:50]), InvalidRequest, "is broken"),
        (sent(picture(width=101, height=100)), InvalidRequest, "over 10000 pixels"),
        (sent(bytes(20_001)), InvalidRequest, "over 20000 bytes"),
        (sent(bytes(40_000)), InvalidRequest, "over 20000 bytes"),
    ],
)
def test_an_image_that_is_not_taken_is_named_with_its_reason(
    image: SentImage, error: type[InvalidRequest], reason: str
) -> None:
    with pytest.raises(error, match=reason) as caught:
        read_images([sent(picture()), image], LIMITS)
    assert caught.value.param == FIELD


def test_a_small_file_of_very_many_pixels_is_refused_before_it_is_decoded() -> None:
    bomb = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(bomb, "PNG")
    with pytest.raises(InvalidRequest, match="pixels"):
        read_images([sent(bomb.getvalue())], ImageLimits())


def test_images_of_a_request_are_bounded_in_number_and_all_together() -> None:
    with pytest.raises(InvalidRequest, match="3 images; 2 are allowed"):
        check_count([sent(picture())] * 3, LIMITS)
    file = picture()
    # Bytes after the end of a PNG are part of the file and change no pixel.
    large = file + bytes(MAX_TOTAL_BYTES // 2)
    with pytest.raises(InvalidRequest, match="in all"):
        read_images([sent(large)] * 2, ImageLimits(max_bytes=MAX_TOTAL_BYTES))


def test_models_without_a_served_vision_say_why() -> None:
    images = [sent(picture())]
    with pytest.raises(UnsupportedField, match="it has no vision") as caught:
        check_vision(images, "m", None)
    assert caught.value.param == FIELD
    with pytest.raises(UnsupportedField, match="its architecture is x"):
        check_vision(images, "m", Vision(unserved="its architecture is x"))
    assert check_vision(images, "m", VISION) is VISION


def test_a_worker_that_takes_no_images_is_named_with_the_engine_that_does() -> None:
    seeing, blind = (Worker(id=name, engine=name, version="1") for name in ("torch", "vllm"))
    seeing.capabilities.images = True
    check_workers([sent(picture())], [seeing, seeing])
    with pytest.raises(UnsupportedField, match=r"engine vllm of worker vllm.* engine torch") as caught:
        check_workers([sent(picture())], [seeing, blind])
    assert caught.value.param == FIELD


def test_each_image_has_its_place_in_the_expanded_prompt() -> None:
    prompt = expand([1, 9, 2, 9, 9], VISION)
    assert prompt == [1, 9, 9, 9, 2, 9, 9, 9, 9, 9, 9]
    files = [b"a", b"b", b"a"]
    placed = place_images(prompt, files, VISION)
    assert [(each.span.first, each.span.tokens, each.data) for each in placed] == [
        (1, 3, b"a"),
        (5, 3, b"b"),
        (8, 3, b"a"),
    ]
    assert [each.span.digest for each in placed] == [*map(image_hash, files)]


def test_placeholders_have_to_be_those_of_the_images() -> None:
    names = {VISION.token_id: "<image>"}
    assert expanded([1, 9, 2], 1, VISION, names) == [1, 9, 9, 9, 2]
    with pytest.raises(InvalidRequest, match="'<image>' stands for an image"):
        expanded([1, 9, 9], 1, VISION, names)
    with pytest.raises(InvalidRequest, match="shows 0 of 1 images"):
        expanded([1, 2], 1, VISION, names)
