"""Chat templates: Jinja text that comes with a model, rendered as transformers' `apply_chat_template` renders it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from libs.contracts.errors import InvalidRequest, StartupError

MAX_REASON_CHARS = 200
"""Of a template's own words, which may have a message's text in them."""
MAX_RENDERED_CHARS = 16 * 1024 * 1024
PART_JOINER: Final = "\n"
"""Between the text parts of a message, for templates that take one text. vLLM's and llama.cpp's choice: clients send
parts as blocks of their own, and words must not run together."""
_CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_NO_TOOLS_ONLY: Final = "{{ raise_exception('its only template is for chats with tools') }}"
_LEFT_OUT: Final = object()
_LIST_FILTERS: Final = frozenset({"map", "selectattr", "rejectattr"})
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

ChatMessage = Mapping[str, Any]
"""role, content (text, a list of {"type": "text", "text": ...}, or None), and where given name, reasoning_content,
reasoning, tool_calls (as in OpenAI's API, with `Arguments`), tool_call_id."""


class Arguments(dict[str, Any]):
    """A call's arguments: an object to templates that write it as JSON, the JSON text that the model once wrote to
    those that join it to text."""

    def __init__(self, fields: Mapping[str, Any], text: str | None = None) -> None:
        super().__init__(fields)
        self._text = json.dumps(fields, ensure_ascii=False) if text is None else text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class ChatTemplate:
    """The templates of one model: one for all chats, or another for those with tools."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], with_tools: str | None = None) -> None:
        """`source`: None where only `with_tools` exists. `special_tokens`: texts by name, e.g. {"bos_token": "<s>"}.

        Raises StartupError when a template does not parse."""
        environment = _environment()
        self.source = (source or "") + (with_tools or "")
        try:
            self._plain = _Template(environment, _NO_TOOLS_ONLY if source is None else source)
            self._with_tools = _Template(environment, with_tools) if with_tools is not None else self._plain
        except TemplateError as error:
            raise StartupError(f"the model's chat template does not parse: {error}") from None
        self.variables = self._plain.variables | self._with_tools.variables
        """Names that it reads from outside."""
        self._special_tokens = dict(special_tokens)

    def names(self, word: str, *, tools: bool) -> bool:
        """Whether the template that such chats get has `word` as a field of a message or as a text of its code."""
        return word in (self._with_tools if tools else self._plain).words

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NOTHING,
        opens_answer: bool = True,
        continues: bool = False,
    ) -> str:
        """The prompt, ending where the model's answer starts, or with the last message.

        `continues`: it ends within the last message, which the answer continues; only without `opens_answer`.
        Raises InvalidRequest when the template refuses, or a variable has the name of something that every template is
        given."""
        given: dict[str, Any] = {"add_generation_prompt": opens_answer, **self._special_tokens}
        # None as transformers has it: templates ask `tools is not none`.
        given["tools"] = list(tools) or None
        taken = sorted({"messages", *given} & variables.keys()) if variables else ()
        if taken:
            raise InvalidRequest(f"chat_template_kwargs: {taken[0]} is not the request's", param="chat_template_kwargs")
        given = {"documents": None, **given, **variables}
        documents = given["documents"]
        if documents is not None and not (
            isinstance(documents, list) and all(isinstance(each, dict) for each in documents)
        ):
            text = "chat_template_kwargs: documents must be a list of objects"
            raise InvalidRequest(text, param="chat_template_kwargs")
        template = self._with_tools if tools else self._plain
        text = template.continued(messages, given) if continues else template.text(messages, given)
        if len(text) > MAX_RENDERED_CHARS:
            raise InvalidRequest(f"the chat renders to over {MAX_RENDERED_CHARS} characters", param="messages")
        return text


class _Template:
    """One Jinja text, and what can be read off it of the messages that it takes."""

    def __init__(self, environment: ImmutableSandboxedEnvironment, source: str) -> None:
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        self.words = frozenset(node.attr for node in tree.find_all(nodes.Getattr)) | frozenset(
            node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
        )
        contents = _content_names(tree)
        asks = {test.name for test in tree.find_all(nodes.Test) if _is_content(test.node, contents)}
        walked = [loop.iter for loop in tree.find_all(nodes.For)]
        walked += [each.node for each in tree.find_all(nodes.Filter) if each.name in _LIST_FILTERS and each.node]
        self._takes_parts = any(_is_content(node, contents) for node in walked)
        self._takes_texts = not self._takes_parts or "string" in asks
        # What null content becomes; the next where a template refuses the one before. transformers leaves it out since
        # 5.23, and handed on None before: DeepSeek R1's templates write calls only of messages whose content is none.
        self._nulls: tuple[Any, ...] = (_LEFT_OUT, "")
        compared = list(tree.find_all(nodes.Compare))
        if "none" in asks or any(_compares_with_none(node, contents) for node in compared):
            self._nulls = (None, *self._nulls)
        self._knows_developer = any(
            const.value == "developer" for node in compared for const in node.find_all(nodes.Const)
        )

    def text(self, messages: Sequence[ChatMessage], given: Mapping[str, Any]) -> str:
        """Raises InvalidRequest when the template refuses."""
        turns = [self._turn(message) for message in messages]
        some_null = any(turn["content"] is None for turn in turns)
        refusal = ""
        for null in self._nulls if some_null else self._nulls[:1]:
            shaped = [turn if turn["content"] is not None else self._without_content(turn, null) for turn in turns]
            try:
                return self._template.render(messages=shaped, **given)
            except Exception as error:  # a template can raise whatever Python does
                refusal = str(error)
        raise InvalidRequest(
            f"the model's chat template refuses these messages: {refusal[:MAX_REASON_CHARS]}", param="messages"
        )

    def continued(self, messages: Sequence[ChatMessage], given: Mapping[str, Any]) -> str:
        """As transformers finds the end of a message: by a tag behind its text."""
        *before, last = messages
        content = last.get("content")
        parts = [dict(part) for part in content] if isinstance(content, list) else []
        text = parts[-1]["text"] if parts else content
        if not isinstance(text, str):
            raise InvalidRequest("the last message has no text to continue", param="messages")
        if parts:
            parts[-1]["text"] = text + _CONTINUE_TAG
        rendered = self.text([*before, {**last, "content": parts or text + _CONTINUE_TAG}], given)
        tag = _CONTINUE_TAG.strip()
        if text.strip() not in rendered or tag not in rendered:
            raise InvalidRequest(
                "the model's chat template does not show the last message as it is, so it cannot be continued",
                param="messages",
            )
        end = rendered.rindex(tag)
        kept = rendered[:end]
        # Without its space the tag was trimmed, and so would white space at the message's end have been.
        return kept if rendered.startswith(_CONTINUE_TAG, end) else kept.rstrip()

    def _content(self, content: Any) -> Any:
        only_parts = isinstance(content, str) and not self._takes_texts
        return [{"type": "text", "text": content}] if only_parts else content

    def _without_content(self, turn: Mapping[str, Any], null: Any) -> dict[str, Any]:
        """A copy with null, no content or an empty text."""
        if null is _LEFT_OUT:
            return {name: value for name, value in turn.items() if name != "content"}
        return {**turn, "content": self._content(null)}

    def _turn(self, message: ChatMessage) -> dict[str, Any]:
        """A copy in the shape that this template takes."""
        turn = dict(message)
        role, content = turn["role"], turn.get("content")
        # In tool messages, a list is what a family makes of it (GLM: several results); OpenAI's parts are one text.
        if isinstance(content, list) and (not self._takes_parts or role == "tool"):
            content = PART_JOINER.join(part["text"] for part in content)
        turn["content"] = self._content(content)
        if role == "developer" and not self._knows_developer:
            turn["role"] = "system"  # OpenAI's newer name of it
        reasoning = next(
            (turn[name] for name in ("reasoning_content", "reasoning") if turn.get(name) is not None), None
        )
        if reasoning is None:
            return turn
        turn["reasoning_content"] = reasoning
        # gpt-oss's name; its template refuses a message with calls that has both this and text.
        return turn if turn.get("tool_calls") and content else {"thinking": reasoning, **turn}


def _content_names(tree: nodes.Template) -> frozenset[str]:
    """Variables that hold a message's content: `content`, and those that are set to it."""
    names = frozenset({"content"})
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names |= {assign.target.name}
    return names


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    """Whether an expression is a message's content, filtered or sliced."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == "content")
    if isinstance(node, nodes.Call):  # message.get("content")
        first = node.args[0] if node.args else None
        is_get = isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
        return is_get and isinstance(first, nodes.Const) and first.value == "content"
    if isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        return _is_content(node.node, names)
    return False


def _compares_with_none(node: nodes.Compare, contents: frozenset[str]) -> bool:
    sides = [node.expr, *(operand.expr for operand in node.ops)]
    is_none = any(isinstance(side, nodes.Const) and side.value is None for side in sides)
    return is_none and any(_is_content(side, contents) for side in sides)


class _Generation(Extension):
    """Templates may mark what the model writes by {% generation %}; it means something to training only."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own, as in transformers: what is set in it is not set behind it.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _DictMaker:
    """`dict` in templates, without its attributes."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """`namespace` in templates, without names that are Python's own."""

    def __init__(*args: Any, **fields: Any) -> None:
        made, *given = args
        attributes = dict(*given, **fields)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(made, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: it starts with an underscore")


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja with what transformers 5.24 adds to it and takes from it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _DictMaker()
    environment.globals["namespace"] = _PlainNamespace
    return environment


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
    return datetime.now().strftime(template)
