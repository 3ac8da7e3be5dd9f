"""Tokenizers with the markers of gpt-oss's format, for machines without its own tokenizer."""

from tokenizers import AddedToken
from tokenizers import Tokenizer as InnerTokenizer

from libs.model.chat import ChatTemplate
from libs.model.info import CHATML_TEMPLATE, sim_tokenizer
from libs.model.tokenizer import Tokenizer

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")


def with_markers(inner: InnerTokenizer) -> Tokenizer:
    """Return `inner` with the markers as added special tokens."""
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS])
    return Tokenizer(inner, ChatTemplate(CHATML_TEMPLATE, {}))


def sim_with_markers() -> Tokenizer:
    """Return the tokenizer of the built-in model, with one token a byte, and the markers."""
    return with_markers(sim_tokenizer())
