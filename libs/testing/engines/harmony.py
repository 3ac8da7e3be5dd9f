"""Tokenizers with the markers of gpt-oss's format, whose own tokenizer is nowhere on this machine."""

from tokenizers import AddedToken
from tokenizers import Tokenizer as InnerTokenizer

from libs.model.chat import ChatTemplate
from libs.model.info import CHATML_TEMPLATE, sim_tokenizer
from libs.model.tokenizer import Tokenizer

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")


def with_markers(inner: InnerTokenizer) -> Tokenizer:
    """`inner` with the markers as added special tokens."""
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS])
    return Tokenizer(inner, ChatTemplate(CHATML_TEMPLATE, {}))


def sim_with_markers() -> Tokenizer:
    """Tokenizer of the built-in model: a token a byte."""
    return with_markers(sim_tokenizer())
