"""Tests of a request's images: the accepted files, and the error for each that is refused."""

import io
import struct
from base64 import b64encode
from typing import Any

import pytest
from PIL import Image

from libs.contracts.errors import InvalidRequest, UnsupportedField
from libs.contracts.hashing import image_hash
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.model import pictures
from libs.model.vision import Vision, expand
from services.gateway.images.files import (
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
from services.gateway.settings import GatewaySettings

FIELD = "messages[0].content[0].image_url.url"
VISION = Vision(token_id=9, image_tokens=3)
LIMITS = ImageLimits(max_images=2, max_bytes=20_000, max_pixels=10_000)


def picture(form: str = "PNG", width: int = 20, height: int = 10, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(file, form, **options)
    return file.getvalue()


def sent(file: bytes, kind: str = "image/png") -> SentImage:
    return SentImage(f"data:{kind};base64,{b64encode(file).decode()}", FIELD)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_of_known_formats_are_passed_on_unchanged_whatever_type_is_declared(form: str) -> None:
    file = picture(form)
    assert read_images([sent(file), sent(file, "image/jpeg")], LIMITS) == [file, file]


@pytest.mark.parametrize(
    ("image", "error", "reason"),
    [
        (SentImage("https://example.com/fox.png", FIELD), InvalidRequest, "the URL is not an image"),
        (SentImage("data:text/plain;base64,AAAA", FIELD), InvalidRequest, "the URL is not an image"),
        (SentImage("data:image/png;base64,A", FIELD), InvalidRequest, "is not base64"),
        (sent(b""), InvalidRequest, "not an image in a known format"),
        (sent(picture("TIFF")), InvalidRequest, "send PNG, JPEG, WEBP, GIF"),
        (sent(picture()[:50]), InvalidRequest, "is broken"),
        (sent(picture(width=101, height=100)), InvalidRequest, "over 10000 pixels"),
        (sent(bytes(20_001)), InvalidRequest, "over 20000 bytes"),
        (sent(bytes(40_000)), InvalidRequest, "over 20000 bytes"),
    ],
)
def test_a_refused_image_is_named_with_its_reason(image: SentImage, error: type[InvalidRequest], reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        read_images([sent(picture()), image], LIMITS)
    assert caught.value.param == FIELD


def test_a_small_file_with_very_many_pixels_is_refused_before_it_is_decoded() -> None:
    bomb = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(bomb, "PNG")
    with pytest.raises(InvalidRequest, match="pixels"):
        read_images([sent(bomb.getvalue())], ImageLimits())


def test_the_largest_image_fits_the_largest_body_by_default() -> None:
    given = {name: field.default for name, field in GatewaySettings.model_fields.items()}
    assert len(sent(bytes(given["max_image_bytes"])).url) + 100_000 < given["max_body_bytes"]
    assert given["max_body_bytes"] * 10 < given["max_open_body_bytes"]


def test_a_jpeg_with_too_many_scans_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = picture("JPEG", progressive=True)
    assert read_images([sent(file)], LIMITS) == [file]
    monkeypatch.setattr(pictures, "MAX_SCANS", 3)
    with pytest.raises(InvalidRequest, match="the image is a JPEG of over 3 scans: save it with fewer"):
        read_images([sent(file)], LIMITS)


def test_scan_markers_within_segments_or_after_a_jpeg_do_not_count() -> None:
    """A phone's film or thumbnail in the same file, for example."""
    file, marks = picture("JPEG"), b"\xff\xda" * 100
    comment = b"\xff\xfe" + (len(marks) + 2).to_bytes(2, "big") + marks
    whole = file[:2] + comment + file[2:] + marks
    assert read_images([sent(whole)], LIMITS) == [whole]


def test_an_image_a_few_pixels_wide_is_refused_before_a_processor_enlarges_it() -> None:
    bar = picture(width=1, height=50)
    assert read_images([sent(bar)], LIMITS) == [bar]
    with pytest.raises(InvalidRequest, match="the image is over 50 times as long as wide"):
        read_images([sent(picture(width=51, height=1))], LIMITS)


@pytest.mark.parametrize("tag", [0x10F, 0x111], ids=["a number as text", "text as a number"])
def test_an_image_with_an_unreadable_rotation_is_refused_here_and_not_by_a_worker(tag: int) -> None:
    kind = 11 if tag == 0x10F else 2
    entries = struct.pack("<HHHIIHHII", 2, 0x112, 3, 1, 6, tag, kind, 1, 0x41)
    file = picture("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0" + entries + bytes(4))
    with pytest.raises(InvalidRequest, match="the image is broken"):
        read_images([sent(file)], LIMITS)


def test_images_of_a_request_are_bounded_in_number_and_in_total_size() -> None:
    with pytest.raises(InvalidRequest, match="3 images; 2 are allowed"):
        check_count([sent(picture())] * 3, LIMITS)
    file = picture()
    # Bytes after the end of a PNG are part of the file and change no pixel.
    large = file + bytes(MAX_TOTAL_BYTES // 2)
    with pytest.raises(InvalidRequest, match="in all"):
        read_images([sent(large)] * 2, ImageLimits(max_bytes=MAX_TOTAL_BYTES))


def test_models_without_supported_vision_give_the_reason() -> None:
    images = [sent(picture())]
    with pytest.raises(UnsupportedField, match="it has no vision") as caught:
        check_vision(images, "m", None)
    assert caught.value.param == FIELD
    with pytest.raises(UnsupportedField, match="its architecture is x"):
        check_vision(images, "m", Vision(unserved="its architecture is x"))
    assert check_vision(images, "m", VISION) is VISION


def test_a_worker_without_image_support_is_named_with_the_engine_that_has_it() -> None:
    seeing, blind = (Worker(id=name, engine=name, version="1") for name in ("torch", "vllm"))
    seeing.capabilities.images = True
    check_workers([sent(picture())], [seeing, seeing])
    with pytest.raises(UnsupportedField, match=r"engine vllm of worker vllm.* engine torch") as caught:
        check_workers([sent(picture())], [seeing, blind])
    assert caught.value.param == FIELD


def test_each_image_has_its_range_in_the_expanded_prompt() -> None:
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


def test_placeholders_must_match_the_images() -> None:
    names = {VISION.token_id: "<image>"}
    assert expanded([1, 9, 2], 1, VISION, names) == [1, 9, 9, 9, 2]
    with pytest.raises(InvalidRequest, match="'<image>' stands for an image"):
        expanded([1, 9, 9], 1, VISION, names)
    with pytest.raises(InvalidRequest, match="shows 0 of 1 images"):
        expanded([1, 2], 1, VISION, names)
