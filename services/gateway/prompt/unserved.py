"""Fields of OpenAI's API that are not served: accepted while they request nothing, otherwise refused by name. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from services.gateway.prompt.schema import Message

# Values, besides null, that request the default behaviour.
_COMMON: Final[Mapping[str, tuple[Any, ...]]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    # vLLM's
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}

UNSERVED_ROLES: Final = frozenset({"function"})
UNSERVED_PARTS: Final = frozenset({"image_url", "input_audio", "file", "refusal"})
"""Types of message parts in OpenAI's API that are not served."""

_KNOWN: Final = frozenset(Message.__struct_fields__)
# Values of unused fields of an answer, which clients send back in messages.
_NOTHING: Final[tuple[Any, ...]] = (None, [], {}, "")


def drop_harmless(body: dict[str, Any], served: frozenset[str]) -> dict[str, Any]:
    """Return the body without unserved fields that request nothing; refuse by name anything left beside `served`."""
    kept = {key: value for key, value in body.items() if key in served or not _is_harmless(key, value)}
    messages = kept.get("messages")
    if isinstance(messages, list):
        kept["messages"] = [_drop_unused(message) if isinstance(message, dict) else message for message in messages]
    options = kept.get("stream_options")
    if isinstance(options, dict) and not options.get("include_obfuscation"):
        kept["stream_options"] = {key: value for key, value in options.items() if key != "include_obfuscation"}
    return kept


def _is_harmless(key: str, value: Any) -> bool:
    # `True == 1` in Python, but not in JSON.
    return value is None or any(type(value) is type(known) and value == known for known in _COMMON.get(key, ()))


def _drop_unused(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key in _KNOWN or value not in _NOTHING}
