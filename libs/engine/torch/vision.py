"""Images in prompts: decoding, the model's image processor, the vision tower, and the cache of embeddings.

When a prompt is computed, an image's embedding replaces the token embeddings of its placeholders. Decoding needs only
the KV.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor

from libs.contracts.errors import StartupError
from libs.engine.port import PromptImage
from libs.engine.runner import Chunk, ImageCounts
from libs.model.pictures import TRIAL_PIXELS, BrokenImage, breaks_on_errors, read_sent_picture
from libs.model.vision import Vision


class ImageEncoder:
    """The vision part of one model, with a cache of recent images' embeddings by digest. Not thread-safe."""

    def __init__(self, model: Any, folder: Path, vision: Vision, cache_bytes: int) -> None:
        """Read the image processor. Raise StartupError if the folder has none, or if it does not fit the model."""
        self._model = model
        self._vision = vision
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        """[image_tokens, hidden] by digest, the most recently used last."""
        self._kept_bytes = 0
        self._used = self._encoded = 0
        try:
            # The pixels of the torchvision backend differ slightly, and all workers must compute the same ones.
            self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
            self._embed(Image.new("RGB", (TRIAL_PIXELS, TRIAL_PIXELS)))
        except BrokenImage as error:
            raise StartupError(f"images of the model in {folder} cannot be served: {error}") from error
        except Exception as error:  # transformers raises anything from KeyError to OSError
            raise StartupError(f"cannot use the image processor in {folder}: {error}") from error

    def __contains__(self, digest: object) -> bool:
        return digest in self._kept

    @property
    def counts(self) -> ImageCounts:
        return ImageCounts(self._used, self._encoded, self._kept_bytes)

    def drop(self) -> None:
        """Drop all embeddings before the device is freed."""
        self._kept.clear()
        self._kept_bytes = 0

    def encode(self, images: Sequence[PromptImage]) -> dict[bytes, str]:
        """Compute and cache the images' embeddings.

        Return the reason, by digest, for each image that cannot be computed.
        """
        faults: dict[bytes, str] = {}
        for image in images:
            try:
                self._keep(image.span.digest, self._encode(image))
            except BrokenImage as error:
                faults[image.span.digest] = str(error)
        if self._model.device.type == "cuda":
            # The caller measures the step's time, which must include the GPU's work.
            torch.cuda.current_stream(self._model.device).synchronize()
        return faults

    def embed(self, token_ids: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Return [tokens, hidden], the text model's input for a step's row of tokens [tokens] int64."""
        row: torch.Tensor = self._model.get_input_embeddings()(token_ids)
        first = 0
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            for image in chunk.images:
                span = image.span
                low, high = max(span.first, chunk.start), min(span.first + span.tokens, end)
                at = first + low - chunk.start
                row[at : at + high - low] = self._find(image)[low - span.first : high - span.first]
                self._used += low == span.first
            first += len(chunk.token_ids)
        return row

    def _find(self, image: PromptImage) -> torch.Tensor:
        found = self._kept.get(image.span.digest)
        if found is None:
            # The image was evicted, because the cache is too small for the images of this step.
            found = self._encode(image)
            self._keep(image.span.digest, found)
        else:
            self._kept.move_to_end(image.span.digest)
        return found

    def _keep(self, digest: bytes, embedding: torch.Tensor) -> None:
        if digest in self._kept:
            return
        # The latest embedding is cached whatever its size, because the next step needs it.
        while self._kept and self._kept_bytes + embedding.nbytes > self._cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.nbytes
        self._kept[digest] = embedding
        self._kept_bytes += embedding.nbytes

    def _encode(self, image: PromptImage) -> torch.Tensor:
        with breaks_on_errors("encoded"):
            found = self._embed(read_sent_picture(image.data, image.span.digest))
        self._encoded += 1
        return found

    def _embed(self, image: Image.Image) -> torch.Tensor:
        model = self._model
        pixels = self._processor(images=image, return_tensors="pt")["pixel_values"]  # [1, 3, height, width]
        with torch.inference_mode():
            output = model.get_image_features(pixel_values=pixels.to(model.device, model.dtype), return_dict=True)
            found: torch.Tensor = output.pooler_output[0]
            # A copy, because a view would keep the tower's whole output in memory.
            found = found.to(model.dtype).clone()
        if found.shape[0] != self._vision.image_tokens:
            raise BrokenImage(
                f"an image has {found.shape[0]} embeddings for the {self._vision.image_tokens} tokens that its"
                " processor's files name"
            )
        return found
