"""Properties of prompts refused by length: whether tokenised or not, they have too many tokens."""

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from libs.model.info import byte_alphabet, sim_tokenizer
from libs.model.tokenizer import Tokenizer

WORDS = ["the quick brown fox", "aaaa bbbb", "    ", "\n\n", "1234567", "naïve", "日本語", "\x04\x16", "don't", "#" * 9]


def trained(*, lacks: str = "") -> tokenizers.Tokenizer:
    """Train a byte-level vocabulary with merges; `lacks`: characters unknown to it, as to SmolLM2's."""
    found = tokenizers.Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    found.pre_tokenizer = pre_tokenizers.Sequence(steps)
    found.decoder = decoders.ByteLevel()
    letters = [letter for letter, byte in byte_alphabet().items() if chr(byte) not in lacks]
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=letters, special_tokens=["<|end|>"])
    found.train_from_iterator(WORDS[:7] * 50, trainer)
    return found


KINDS = [Tokenizer(made, None) for made in (trained(), trained(lacks="\x04\x16"), sim_tokenizer())]
TEXTS = st.lists(st.one_of(st.sampled_from([*WORDS, "<|end|>"]), st.text(max_size=5)), max_size=8).map("".join)


@given(st.sampled_from(KINDS), TEXTS, st.integers(1, 60), st.integers(0, 40))
def test_a_prompt_refused_by_its_length_has_too_many_tokens(
    tokenizer: Tokenizer, text: str, times: int, most: int
) -> None:
    text *= times
    if tokenizer.has_more(text, most):
        assert len(tokenizer.encode(text, add_special_tokens=False)) > most


def test_long_texts_are_refused_untokenised_and_unknown_tokenizers_are_run() -> None:
    text = "the quick brown fox 12 " * 20_000
    assert [each.has_more(text, 8191) for each in KINDS] == [True, True, True]
    assert not KINDS[1].has_more("\x04" * 500_000, 8191), "a vocabulary without the character has no token for it"
    words = tokenizers.Tokenizer(models.WordLevel({"x": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert not Tokenizer(words, None).has_more(text, 1), "one token may stand for any text"
