"""Removal of fields that have no effect, which some clients always send. Pure."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from services.gateway.request.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
)

# The values that request the default behaviour. Null does too.
COMMON_DEFAULTS: Final[Mapping[str, tuple[Any, ...]]] = {
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
    "length_penalty": (1,),
    "priority": (0,),
    "bad_words": ([],),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "vllm_xargs": ({},),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "watermarking": (False,),
    "stream_interval": (1,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}
_CONSTRAINT_DEFAULTS: Final[Mapping[str, Any]] = {
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
}

_KNOWN: Final = frozenset(Message.__struct_fields__)
# The values of unused fields in an answer. Clients return answers with these fields in later messages.
_NOTHING: Final[tuple[Any, ...]] = (None, [], {}, "")
# Reasoning and signatures that some clients store with an answer for the provider that wrote it.
_FOREIGN: Final = frozenset({"provider_specific_fields", "thinking_blocks", "reasoning_details"})
_FOREIGN_IN_CALLS: Final = frozenset({"provider_specific_fields", "extra_content"})


def drop_harmless(
    body: dict[str, Any], served: frozenset[str], also: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the body without fields that are not served but would have no effect.

    Remaining fields outside `served` are refused later. `also` contains further defaults of one route.
    """
    kept = {key: value for key, value in body.items() if key in served or not _is_default(value, COMMON_DEFAULTS, key)}
    kept = {key: value for key, value in kept.items() if key not in (also or {}) or value is not (also or {})[key]}
    constraints = kept.get("structured_outputs")
    if isinstance(constraints, dict):
        kept["structured_outputs"] = {
            key: value
            for key, value in constraints.items()
            if key not in _CONSTRAINT_DEFAULTS or value is not _CONSTRAINT_DEFAULTS[key]
        }
    messages = kept.get("messages")
    if isinstance(messages, list):
        kept["messages"] = [_drop_unused(message) if isinstance(message, dict) else message for message in messages]
    options = kept.get("stream_options")
    if isinstance(options, dict) and not options.get("include_obfuscation"):
        kept["stream_options"] = {key: value for key, value in options.items() if key != "include_obfuscation"}
    return kept


def drop_defaults(body: Mapping[str, Any], defaults: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the body without nulls and without fields whose value is one of their `defaults`."""
    return {key: value for key, value in body.items() if not _is_default(value, defaults, key)}


def _is_default(value: Any, defaults: Mapping[str, tuple[Any, ...]], key: str) -> bool:
    # `True == 1` in Python, but not in JSON.
    return value is None or any(type(value) is type(known) and value == known for known in defaults.get(key, ()))


def tidy_tool(tool: Any) -> Any:
    """Return a tool without `defer_loading: false`, which is the default."""
    if not isinstance(tool, dict) or tool.get("defer_loading") is not False:
        return tool
    return {key: value for key, value in tool.items() if key != "defer_loading"}


def _drop_unused(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "assistant":
        message = _without_foreign(_with_refusal(message))
    return {key: value for key, value in message.items() if key in _KNOWN or value not in _NOTHING}


def _without_foreign(message: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if key not in _FOREIGN}
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [
            {key: value for key, value in call.items() if key not in _FOREIGN_IN_CALLS}
            if isinstance(call, dict)
            else call
            for call in calls
        ]
    return kept


def _with_refusal(message: dict[str, Any]) -> dict[str, Any]:
    """Turn a refusal in an earlier answer into text, as vLLM does."""
    content, refusal = message.get("content"), message.get("refusal")
    if isinstance(refusal, str) and not content:
        return {**message, "content": refusal, "refusal": None}
    if isinstance(content, list):
        return {**message, "content": [refusal_as_text(part, "text") for part in content]}
    return message


def refusal_as_text(part: Any, kind: str) -> Any:
    """Return a refusal part as a text part of type `kind`. Return any other part unchanged."""
    if not isinstance(part, dict) or part.get("type") != "refusal" or "text" in part:
        return part
    kept = {key: value for key, value in part.items() if key != "refusal"}
    return {**kept, "type": kind, "text": part.get("refusal")}


# As in vLLM, a chat's special tokens come from the template, whereas a prompt's are added by default.
tidy_chat = partial(drop_harmless, served=frozenset(ChatRequest.__struct_fields__), also={"add_special_tokens": False})
tidy_completion = partial(
    drop_harmless, served=frozenset(CompletionRequest.__struct_fields__), also={"add_special_tokens": True}
)
tidy_tokenize = partial(drop_harmless, served=frozenset(TokenizeRequest.__struct_fields__))
tidy_detokenize = partial(drop_harmless, served=frozenset(DetokenizeRequest.__struct_fields__))
