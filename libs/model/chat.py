"""Chat templates: Jinja text that comes with a model, rendered in a sandbox with the names Hugging Face gives it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from libs.contracts.errors import InvalidRequest, StartupError

MAX_REASON_CHARS = 200
"""Of a template's own words, which may have a message's text in them."""
MAX_RENDERED_CHARS = 16 * 1024 * 1024
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

ChatMessage = Mapping[str, Any]
"""role, content (text, or a list of {"type": "text", "text": ...}), and where given name, reasoning_content, tool_calls
(as in OpenAI's API, with `Arguments`), tool_call_id."""


class Arguments(dict[str, Any]):
    """A call's arguments: an object to templates that write it as JSON, its JSON to those that join it to text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class _Generation(Extension):
    """Templates may mark what the model writes by {% generation %}; it means something to training only."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template of one model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], with_tools: str | None = None) -> None:
        """`special_tokens`: texts by name, e.g. {"bos_token": "<s>"}. `with_tools`: another template for chats with
        tools, which some models have. Raises StartupError when it does not parse."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self.source = source + (with_tools or "")
        try:
            self._template = environment.from_string(source)
            self._with_tools: Template = environment.from_string(with_tools) if with_tools else self._template
            self.variables = frozenset(
                meta.find_undeclared_variables(environment.parse(source))
                | meta.find_undeclared_variables(environment.parse(with_tools or ""))
            )
            """Names that it reads from outside."""
        except TemplateError as error:
            raise StartupError(f"the model's chat template does not parse: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NOTHING,
        opens_answer: bool = True,
    ) -> str:
        """The prompt, ending where the model's answer starts, or with the last message.

        Raises InvalidRequest when the template refuses, or a variable has the name of something that every template is
        given."""
        flat = [{**message, "content": _text_of(message.get("content"))} for message in messages]
        given: dict[str, Any] = {"messages": flat, "add_generation_prompt": opens_answer, **self._special_tokens}
        if tools:
            given["tools"] = tools
        taken = sorted({"tools", *given} & variables.keys()) if variables else ()
        if taken:
            raise InvalidRequest(f"chat_template_kwargs: {taken[0]} is not the request's", param="chat_template_kwargs")
        template = self._with_tools if tools else self._template
        try:
            text = template.render(**given, **variables)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {str(error)[:MAX_REASON_CHARS]}", param="messages"
            ) from None
        if len(text) > MAX_RENDERED_CHARS:
            raise InvalidRequest(f"the chat renders to over {MAX_RENDERED_CHARS} characters", param="messages")
        return text


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or ())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(template: str) -> str:
    return datetime.now().astimezone().strftime(template)
