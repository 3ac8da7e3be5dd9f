"""The images of a chat, from data URLs or fetched files: decoding, limits and positions in the prompt. Pure."""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from PIL import Image, UnidentifiedImageError

from libs.contracts.errors import InvalidRequest, UnsupportedField, one_line
from libs.contracts.hashing import image_hash
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.engine.port import PromptImage
from libs.model.pictures import UnservedPicture, read_picture
from libs.model.vision import FORMATS, Vision, expand, spans

# The bound on all images of a request, so that they fit into one frame within gRPC's message limit.
MAX_TOTAL_BYTES: Final = 8 * 1024 * 1024
_DATA_URL: Final = re.compile(r"data:image/[A-Za-z0-9.+-]{1,64};base64,")
MAX_REASON_CHARS: Final = 200


class SentImage(NamedTuple):
    url: str
    field: str
    """The name of the request's field for errors."""
    file: bytes = b""
    """The file fetched from `url`; empty if `url` is a data URL."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    max_images: int = 8
    """The maximum number of images in a request."""
    max_bytes: int = 4 * 1024 * 1024
    """The maximum size of one image file."""
    max_pixels: int = 16 * 1024 * 1024


def check_vision(images: Sequence[SentImage], model: str, vision: Vision | None) -> Vision:
    """Return the model's vision properties. Raise UnsupportedField if the model accepts no images."""
    if vision is None or vision.unserved:
        why = vision.unserved if vision else "it has no vision: send text only, or name a vision model"
        raise UnsupportedField(f"images are not served for model {model!r}: {why}", param=images[0].field)
    return vision


def check_count(images: Sequence[SentImage], limits: ImageLimits) -> None:
    """Raise InvalidRequest if there are too many images."""
    if len(images) > limits.max_images:
        text = f"the request has {len(images)} images; {limits.max_images} are allowed"
        raise InvalidRequest(text, param=images[limits.max_images].field)


def check_workers(images: Sequence[SentImage], workers: Iterable[Worker]) -> None:
    """Raise UnsupportedField if any of the model's workers does not support images."""
    blind = next((each for each in workers if not each.capabilities.images), None)
    if blind is not None:
        text = (
            f"images are not served by the engine {blind.engine} of worker {blind.id}, release {blind.version}: serve"
            " the model with workers of the engine torch, or of vllm without a KV store, and of this release"
        )
        raise UnsupportedField(text, param=images[0].field)


def max_file_bytes(images: Sequence[SentImage], limits: ImageLimits) -> int:
    """Return an upper bound of the total size of the image files, including those that have not been fetched."""
    sizes = (len(each.url) if _DATA_URL.match(each.url) else limits.max_bytes for each in images)
    return min(sum(sizes), MAX_TOTAL_BYTES)


def read_images(images: Sequence[SentImage], limits: ImageLimits) -> list[bytes]:
    """Return the image files. Raise InvalidRequest, which names the field, if an image is too large or broken.

    Each image is decoded here in the same way as on workers, so that workers never receive an image that they cannot
    decode.
    """
    files: list[bytes] = []
    for url, field, fetched in images:
        data = fetched or _file(url, field, limits)
        if sum(map(len, files)) + len(data) > MAX_TOTAL_BYTES:
            raise InvalidRequest(f"the images are over {MAX_TOTAL_BYTES} bytes in all: send smaller ones", param=field)
        _check(data, field, limits)
        files.append(data)
    return files


def _file(url: str, field: str, limits: ImageLimits) -> bytes:
    found = _DATA_URL.match(url)
    if found is None:
        text = "send data:image/png;base64, and the file in base64, or an address with http:// or https://"
        raise InvalidRequest(f"{field}: the URL is not an image: {text}", param=field)
    if (len(url) - found.end()) // 4 * 3 - 2 > limits.max_bytes:
        raise _too_large(field, limits)
    try:
        data = b64decode(url[found.end() :], validate=True)
    except (Base64Error, ValueError) as error:
        raise InvalidRequest(f"{field} is not base64: {error}", param=field) from None
    if len(data) > limits.max_bytes:
        raise _too_large(field, limits)
    return data


def _too_large(field: str, limits: ImageLimits) -> InvalidRequest:
    return InvalidRequest(f"{field}: the image is over {limits.max_bytes} bytes: send a smaller one", param=field)


def _check(data: bytes, field: str, limits: ImageLimits) -> None:
    try:
        read_picture(data, limits.max_pixels)
    except UnservedPicture as error:
        raise InvalidRequest(f"{field}: the image {error}", param=field) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        text = f"{field}: the image is over {limits.max_pixels} pixels: send a smaller one"
        raise InvalidRequest(text, param=field) from None
    except UnidentifiedImageError:
        text = f"{field}: the file is not an image in a known format: send {', '.join(FORMATS)}"
        raise InvalidRequest(text, param=field) from None
    except Exception as error:  # Pillow raises SyntaxError, struct.error and others in addition to OSError
        reason = one_line(error, MAX_REASON_CHARS)
        raise InvalidRequest(f"{field}: the image is broken: {reason}", param=field) from None


def expanded(token_ids: list[int], images: int, vision: Vision | None, tokens: Mapping[int, str]) -> list[int]:
    """Return a rendered chat with each image's placeholder repeated once for each of the image's tokens.

    Raise InvalidRequest if the number of placeholders differs from the number of images. `tokens` maps the ids of added
    tokens to their texts.
    """
    assert vision is not None, "checked before"
    found, text = token_ids.count(vision.token_id), tokens.get(vision.token_id, "")
    if found > images:
        fault = f"messages: {text!r} stands for an image in this model and cannot be text"
        raise InvalidRequest(fault, param="messages")
    if found < images:
        shown = f"the model's chat template shows {found} of {images} images"
        raise InvalidRequest(f"messages: {shown}, with {text!r}: use the model's own template", param="messages")
    return expand(token_ids, vision)


def place_images(token_ids: Sequence[int], files: Sequence[bytes], vision: Vision) -> tuple[PromptImage, ...]:
    """Return the images with their positions in an expanded prompt."""
    places = spans(token_ids, [image_hash(data) for data in files], vision)
    return tuple(PromptImage(span, data) for span, data in zip(places, files, strict=True))
