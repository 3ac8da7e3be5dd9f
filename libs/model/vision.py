"""The form of images in a model's prompts, read from its files without loading it.

Only LLaVA is supported, with an image processor that resizes all images to one size. Each image then has the same
number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from libs.contracts.hashing import ImageSpan
from libs.model.files import read_json

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""Pillow's names of the formats that are read. Of an animation, only the first picture is used."""
SERVED_TYPES: Final = ("llava",)
PROCESSOR, IMAGE_PROCESSOR = "processor_config.json", "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class Vision:
    """The form of images in a model's prompts."""

    token_id: int = -1
    """The id of the placeholder that a chat template writes once per image."""
    image_tokens: int = 0
    """The number of tokens that an image has in the prompt."""
    unserved: str = ""
    """The reason why the model's images are not supported; empty if they are."""


def load_vision(folder: Path, config: dict[str, Any]) -> Vision | None:
    """Return the vision of the model in a folder, whose config.json is `config`; None for a model without vision.

    Raise StartupError for invalid JSON.
    """
    if not isinstance(config.get("vision_config"), dict):
        return None
    kind = config.get("model_type")
    if kind not in SERVED_TYPES:
        return Vision(unserved=f"its architecture is {kind}, and images are only served for {', '.join(SERVED_TYPES)}")
    token_id = config.get("image_token_id", config.get("image_token_index"))
    files = [folder / name for name in (PROCESSOR, IMAGE_PROCESSOR)]
    processor, images = (read_json(file) if file.is_file() else {} for file in files)
    images = images or processor.get("image_processor") or {}
    patch, size = processor.get("patch_size"), _size(images)
    if not isinstance(token_id, int) or not isinstance(patch, int) or patch < 1:
        return Vision(unserved=f"its {PROCESSOR} lacks patch_size, or its config.json image_token_index")
    if size is None:
        return Vision(unserved=f"its {IMAGE_PROCESSOR} gives images no fixed size")
    # As in transformers' LlavaProcessor.
    tokens = (size[0] // patch) * (size[1] // patch) + int(processor.get("num_additional_image_tokens") or 0)
    if processor.get("vision_feature_select_strategy") == "default":
        tokens -= 1
    return Vision(token_id, tokens) if tokens > 0 else Vision(unserved="its images take no tokens")


def _size(images: dict[str, Any]) -> tuple[int, int] | None:
    """Return (height, width) of processed images; None if it varies."""
    crops = images.get("do_center_crop", "crop_size" in images)
    size = images.get("crop_size" if crops else "size" if images.get("do_resize", True) else "")
    if isinstance(size, int):
        return (size, size) if crops else None
    if not isinstance(size, dict):
        return None
    height, width = size.get("height"), size.get("width")
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None


def expand(token_ids: Sequence[int], vision: Vision) -> list[int]:
    """Return a prompt in which each placeholder is repeated once for each token of its image."""
    return [
        token_id for token_id in token_ids for _ in range(vision.image_tokens if token_id == vision.token_id else 1)
    ]


def spans(token_ids: Sequence[int], digests: Sequence[bytes], vision: Vision) -> list[ImageSpan]:
    """Return the spans of the images, in order, in a prompt that `expand` returned."""
    found: list[ImageSpan] = []
    at = 0
    for digest in digests:
        at = token_ids.index(vision.token_id, at)
        found.append(ImageSpan(at, vision.image_tokens, digest))
        at += vision.image_tokens
    return found
