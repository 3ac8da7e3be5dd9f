"""Small LLaVA models with random weights, in the layout of the published ones, and pictures for them."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    AutoProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from libs.model.info import SIM_EOS, SIM_SPECIAL_TOKENS, sim_tokenizer

SEED = 5
IMAGE_TOKEN = "<image>"
IMAGE_TOKENS = 16
"""The number of tokens of one image."""
SIDE_PIXELS, PATCH_PIXELS = 32, 8
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Images before texts, as in LLaVA's own template."""
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": SIDE_PIXELS, "patch_size": PATCH_PIXELS,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": SIM_EOS,
}  # fmt: skip


def write_random_llava(folder: Path, *, siglip: bool = False, vision: Mapping[str, Any] = _VISION, **text: Any) -> Path:
    """Write a model and its processor into `folder`: Llama with CLIP as LLaVA 1.5, or Qwen2 with SigLIP.

    `text` changes the text model's shape, and `vision` the vision tower's.
    """
    inner = sim_tokenizer()
    inner.add_special_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)])
    bos, eos, *_ = SIM_SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=eos, pad_token=eos)
    token_id, vocab_size = inner.token_to_id(IMAGE_TOKEN), inner.get_vocab_size()
    torch.manual_seed(SEED)
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(**vision, vision_use_head=False) if siglip else CLIPVisionConfig(**vision),
        text_config=(Qwen2Config if siglip else LlamaConfig)(**(_TEXT | text), vocab_size=vocab_size),
        image_token_index=token_id,
        vision_feature_layer=-1 if siglip else -2,
        vision_feature_select_strategy="full" if siglip else "default",
    )
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():  # the weights must make pictures matter to the answers
        model.model.multi_modal_projector.linear_2.weight.mul_(8)
    model.save_pretrained(folder)
    _rename_as_published(folder / "model.safetensors")
    side: int = vision["image_size"]
    square = {"height": side, "width": side}
    images = (
        SiglipImageProcessorPil(size=square)
        if siglip
        else CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=square)
    )
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=vision["patch_size"],
        vision_feature_select_strategy="full" if siglip else "default",
        num_additional_image_tokens=0 if siglip else 1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


def _rename_as_published(file: Path) -> None:
    # Released models name the tower's weights so, and vLLM reads no other names. Recent transformers writes others.
    weights = load_file(file)
    own, published = "vision_tower.", "vision_tower.vision_model."
    save_file({name.replace(own, published): each for name, each in weights.items()}, file, {"format": "pt"})


def picture(seed: int, *, form: str = "PNG", width: int = 50, height: int = 40) -> bytes:
    """Return an image file of noise; equal seeds give equal files."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


class Reference:
    """The answers of transformers for the model in a folder."""

    def __init__(self, folder: Path, backend: str = "pil") -> None:
        self._model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor = AutoProcessor.from_pretrained(folder, backend=backend)

    def generate(self, text: str, files: Sequence[bytes], tokens: int) -> tuple[list[int], list[int]]:
        """Return (prompt tokens as the processor expands them, tokens of the greedy answer)."""
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files] or None
        given = self._processor(images=images, text=text, return_tensors="pt", add_special_tokens=False)
        found = self._model.generate(**given, max_new_tokens=tokens, do_sample=False)[0].tolist()
        length = given["input_ids"].shape[1]
        return found[:length], found[length:]

    def chat(self, messages: list[dict[str, Any]], files: Sequence[bytes], tokens: int) -> tuple[list[int], str]:
        """Return (prompt tokens, text of the greedy answer) of a chat."""
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt, answer = self.generate(text, files, tokens)
        return prompt, self._processor.tokenizer.decode(answer, skip_special_tokens=True)
