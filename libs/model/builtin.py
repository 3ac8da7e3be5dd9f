"""The built-in model of the sim engine, with one token per byte and without files."""

from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BUILTIN_SIM: Final = "builtin:sim"
SIM_NAME: Final = "sim"
SIM_MAX_CONTEXT_TOKENS: Final = 8192
SIM_VOCAB_SIZE: Final = 260
SIM_BOS, SIM_EOS, SIM_IM_START, SIM_IM_END = 256, 257, 258, 259
# In the order of their ids, from 256 on. Ids 0..255 are the bytes.
SIM_SPECIAL_TOKENS: Final = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")

CHATML_TEMPLATE: Final = (
    "{% if tools %}"
    "{{ '<|im_start|>system\nTools:\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    '{{ \'Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or () %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> dict[str, int]:
    """Return the byte behind each character of a byte-level vocabulary (GPT-2's mapping).

    Printable bytes map to themselves, all others to the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def sim_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer without merges, one token per byte."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SIM_SPECIAL_TOKENS])
    return tokenizer
