"""Decoding of a body into the type that a route takes, with errors that name the field at fault. Pure."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec

from libs.contracts.errors import MAX_QUOTED_CHARS, InvalidRequest, UnsupportedField, quoted
from services.gateway.prompt.schema import Effort, Message, PartType, Role

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


MAX_REASON_CHARS = 200
_T = TypeVar("_T", bound=msgspec.Struct)
_PLACE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
# A field, or a flat object under one, whose number is NaN, infinite or too large.
_NOT_FINITE = re.compile(
    rb'"([a-z_]{1,64})"\s*:\s*(?:\{[^{}]{0,256}:\s*)?(?:NaN|-?Infinity|-?[0-9.]{1,32}[eE]\+?[0-9]{3,})'
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MISSING = re.compile(r"missing required field `([^`]*)`")
_UNKNOWN = re.compile(r"contains unknown field `([^`]*)`")
_ENUM = re.compile(r"Invalid enum value '(.*)'", re.DOTALL)
_ALLOWED: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "role": (get_args(Role), UNSERVED_ROLES),
    "type": (get_args(PartType), UNSERVED_PARTS),
    "reasoning_effort": (get_args(Effort), frozenset()),
    "tool_choice": (("none", "auto", "required"), frozenset()),
}
"""Accepted values, and further ones of OpenAI's API that are not served, by the last part of a field's path."""
_UNSERVED_TOOLS = frozenset(
    {"custom", "allowed_tools", "web_search", "web_search_preview", "file_search", "code_interpreter", "mcp"}
    | {"computer_use_preview", "image_generation", "local_shell", "shell", "apply_patch"}
)
_TOOL_TYPES = (("function",), _UNSERVED_TOOLS)


def fit(body: bytes, kind: type[_T], tidy: Callable[[dict[str, Any]], dict[str, Any]]) -> _T:
    """Decode a body or raise InvalidRequest. `tidy` drops fields that request nothing; it runs if decoding fails."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        return _second_look(body, kind, error, tidy)
    except _NO_JSON as error:
        raise _malformed(body, error) from None


def _second_look(
    body: bytes, kind: type[_T], first: msgspec.ValidationError, tidy: Callable[[dict[str, Any]], dict[str, Any]]
) -> _T:
    # Clients send null or a default for fields they do not use: those are dropped before the verdict.
    try:
        plain: Any = msgspec.json.decode(body)
    except msgspec.ValidationError as error:  # without a type to fit: a number out of range
        raise _malformed(body, error) from None
    except _NO_JSON:
        raise _explain(str(first), kind, {}) from None
    if not isinstance(plain, dict):
        raise InvalidRequest("the body must be a JSON object", param="body")
    try:
        return msgspec.convert(tidy(plain), kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, plain) from None
    except RecursionError:
        raise _explain(str(first), kind, {}) from None


def _malformed(body: bytes, error: Exception) -> InvalidRequest:
    if not body.strip():
        return InvalidRequest("the body is empty: send a JSON object", param="body")
    if not_finite := _NOT_FINITE.search(body):
        name = not_finite[1].decode()
        return InvalidRequest(f"{name} is not a finite number", param=name)
    if _SURROGATE.search(body) and _is_json_otherwise(body):
        text = r"the body has half a surrogate pair (\ud800 to \udfff without its other half), which is no character"
        return InvalidRequest(text, param="body")
    return InvalidRequest(f"the body is not JSON in UTF-8: {_cut(str(error), MAX_REASON_CHARS)}", param="body")


def _is_json_otherwise(body: bytes) -> bool:
    # The standard library accepts half of a surrogate pair as a character.
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _explain(text: str, kind: type[msgspec.Struct], plain: dict[str, Any]) -> InvalidRequest:
    place = _PLACE.search(text)
    path = place[1] if place else ""
    key = _key_at_fault(path.removesuffix("[...]"), kind, plain) if path.endswith("[...]") else ""
    path = _cut(path.removesuffix("[...]"), MAX_QUOTED_CHARS)
    unknown, missing = _UNKNOWN.search(text), _MISSING.search(text)
    named = unknown or missing
    if named is not None:
        name = _cut(named[1], MAX_QUOTED_CHARS)
        path = f"{path}.{name}" if path else name
    if unknown is not None:
        return UnsupportedField(f"{path or 'a field without a name'} is not served", param=path or "body")
    if missing is not None:
        return InvalidRequest(f"{path} is missing", param=path)
    if (found := _ENUM.match(text)) and (known := _allowed(path)):
        return _not_allowed(found[1], path, *known)
    reason = _cut(text[: place.start()] if place else text, MAX_REASON_CHARS)
    where = f"{path}[{key}]" if key else path or "body"
    return InvalidRequest(f"{where}: {reason[:1].lower()}{reason[1:]}", param=path or "body")


def _key_at_fault(field: str, kind: type[msgspec.Struct], plain: dict[str, Any]) -> str:
    """Return the quoted key whose value does not fit; empty if none is found."""
    entries, hint = plain.get(field), get_type_hints(kind, include_extras=True).get(field)
    if not isinstance(entries, dict) or hint is None:
        return ""
    for key, value in entries.items():
        try:
            msgspec.convert({key: value}, hint)
        except msgspec.ValidationError:
            return quoted(key)
    return ""


def _not_allowed(value: str, path: str, allowed: tuple[str, ...], unserved: frozenset[str]) -> InvalidRequest:
    choices = f"served {'is' if len(allowed) == 1 else 'are'} {', '.join(allowed)}"
    if value in unserved:
        return UnsupportedField(f"{path}: {value!r} is not served; {choices}", param=path)
    return InvalidRequest(f"{path}: {quoted(value)} is not known; {choices}", param=path)


def _allowed(path: str) -> tuple[tuple[str, ...], frozenset[str]] | None:
    if path in ("response_format.type", "text.format.type"):
        return ("text", "json_object", "json_schema"), frozenset({"grammar", "python", "structural_tag"})
    return _TOOL_TYPES if "tool" in path and path.endswith(".type") else _ALLOWED.get(path.rpartition(".")[2])


def _cut(text: str, most_chars: int) -> str:
    return text if len(text) <= most_chars else f"{text[:most_chars]}..."
