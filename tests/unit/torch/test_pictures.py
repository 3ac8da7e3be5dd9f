"""Test that image files of all kinds are decoded as by transformers."""

import io
from base64 import b64encode
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from PIL import Image
from transformers.image_utils import load_image

from libs.model.pictures import read_picture

ORIENTATION = 0x112
WIDTH, HEIGHT = 31, 20
NOISE = np.random.default_rng(3).integers(0, 65_536, (HEIGHT, WIDTH, 3), dtype=np.uint16)
COLOURS = Image.fromarray((NOISE >> 8).astype(np.uint8))


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def turned(orientation: int, form: str) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return saved(COLOURS, form, exif=exif)


FILES = {
    "CMYK": saved(COLOURS.convert("CMYK"), "JPEG"),
    "palette": saved(COLOURS.convert("P"), "PNG"),
    "palette with a transparent colour": saved(COLOURS.convert("P"), "PNG", transparency=3),
    "16 bits": saved(Image.fromarray(NOISE[:, :, 0]), "PNG"),
    "alpha": saved(COLOURS.convert("RGBA"), "PNG"),
    "grey with alpha": saved(COLOURS.convert("LA"), "PNG"),
    "one bit": saved(COLOURS.convert("1"), "PNG"),
    "animated GIF": saved(COLOURS.convert("P"), "GIF", save_all=True, append_images=[Image.new("P", (31, 20), 3)]),
    "animated WebP": saved(COLOURS, "WEBP", save_all=True, append_images=[Image.new("RGB", (31, 20))]),
    **{f"{form} turned {number}": turned(number, form) for form in ("JPEG", "PNG", "WEBP") for number in range(1, 9)},
}


@pytest.mark.parametrize("name", FILES)
def test_a_decoded_picture_equals_that_of_transformers(name: str) -> None:
    expected = np.asarray(load_image(b64encode(FILES[name]).decode()))
    found = np.asarray(read_picture(FILES[name]))
    assert found.shape == expected.shape
    assert (found == expected).all()
