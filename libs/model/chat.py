"""Chat templates: the Jinja text of a model, rendered as by transformers' `apply_chat_template`."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
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

# The upper bound of a template's own error text, which may contain a message's text.
MAX_REASON_CHARS = 200
MAX_RENDERED_CHARS = 16 * 1024 * 1024
# The separator of a message's text parts, for templates that take a single text. vLLM and llama.cpp use the same.
# Clients send parts as separate blocks, whose words must not run together.
PART_JOINER: Final = "\n"
_CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
_NO_TOOLS_ONLY: Final = "{{ raise_exception('its only template is for chats with tools') }}"
_PROBE: Final = "SYSTEM_MESSAGE_PROBE"
_LEFT_OUT: Final = object()
_LIST_FILTERS: Final = frozenset({"map", "selectattr", "rejectattr"})
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

ChatMessage = Mapping[str, Any]
"""A message as templates receive it.

Its keys are `role` and `content`, which is text, None, or a list of {"type": "text", "text": ...} and {"type":
"image"}. Optional keys are `name`, `reasoning_content`, `reasoning`, `tool_calls` (as in OpenAI's API, with
`Arguments`) and `tool_call_id`.
"""


class Arguments(dict[str, Any]):
    """The arguments of a tool call.

    A template that writes arguments as JSON sees an object. A template that appends them to text sees the JSON text of
    the model.
    """

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
    """The templates of one model: one for all chats, or a second one for chats with tools."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], with_tools: str | None = None) -> None:
        """Parse the templates. Raise StartupError if one cannot be parsed.

        `source` is None if there is only `with_tools`. `special_tokens` contains texts by name, such as {"bos_token":
        "<s>"}.
        """
        environment = _environment()
        self.source = (source or "") + (with_tools or "")
        try:
            self._plain = _ChatTemplate(environment, _NO_TOOLS_ONLY if source is None else source)
            self._with_tools = _ChatTemplate(environment, with_tools) if with_tools is not None else self._plain
        except TemplateError as error:
            raise StartupError(f"the model's chat template does not parse: {error}") from None
        self.variables = self._plain.variables | self._with_tools.variables
        """The names of the variables that the templates read."""
        self._special_tokens = dict(special_tokens)

    def names(self, word: str, *, tools: bool) -> bool:
        """Return whether the template contains `word` as a message's field or as a text constant."""
        return word in (self._with_tools if tools else self._plain).words

    @cached_property
    def shows_system(self) -> bool:
        """True if a chat without tools may begin with a system message, and the prompt then contains that message."""
        try:
            return _PROBE in self.render([{"role": "system", "content": _PROBE}, {"role": "user", "content": "a"}])
        except InvalidRequest:
            return False

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NOTHING,
        opens_answer: bool = True,
        continues: bool = False,
    ) -> str:
        """Return the prompt of a chat.

        With `opens_answer` it ends where the model's answer starts, otherwise with the last message. With `continues`,
        which excludes `opens_answer`, it ends inside the last message, which the answer continues. Raise InvalidRequest
        if the template refuses, or if a variable has the name of one of the template's fixed inputs.
        """
        given: dict[str, Any] = {"add_generation_prompt": opens_answer, **self._special_tokens}
        # None as in transformers, because templates test `tools is not none`.
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


class _ChatTemplate:
    """A single Jinja template, and the form of messages that its syntax tree expects."""

    def __init__(self, environment: ImmutableSandboxedEnvironment, source: str) -> None:
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        # Jinja chains the environment's globals to each template's, and iterates over the chain in plain Python for
        # each text. A copy is equal, since the environment's globals no longer change.
        self._template.globals = dict(self._template.globals)
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
        # The replacements of null content. Each is tried if the template refuses the one before. transformers has
        # omitted null content since 5.23 and passed None before. DeepSeek R1's templates write calls only in messages
        # with null content.
        self._nulls: tuple[Any, ...] = (_LEFT_OUT, "")
        compared = list(tree.find_all(nodes.Compare))
        if "none" in asks or any(_compares_with_none(node, contents) for node in compared):
            self._nulls = (None, *self._nulls)
        self._knows_developer = any(
            const.value == "developer" for node in compared for const in node.find_all(nodes.Const)
        )

    def text(self, messages: Sequence[ChatMessage], given: Mapping[str, Any]) -> str:
        """Return the rendered text. Raise InvalidRequest if the template refuses."""
        turns = [self._turn(message) for message in messages]
        some_null = any(turn["content"] is None for turn in turns)
        refusal = ""
        for null in self._nulls if some_null else self._nulls[:1]:
            shaped = [turn if turn["content"] is not None else self._without_content(turn, null) for turn in turns]
            try:
                return self._template.render(messages=shaped, **given)
            except Exception as error:  # a template can raise any exception
                refusal = str(error)
        raise InvalidRequest(
            f"the model's chat template refuses these messages: {refusal[:MAX_REASON_CHARS]}", param="messages"
        )

    def continued(self, messages: Sequence[ChatMessage], given: Mapping[str, Any]) -> str:
        """Return the text up to the end of the last message.

        Like transformers, find that end by a tag appended to the message.
        """
        *before, last = messages
        content = last.get("content")
        parts = [dict(part) for part in content] if isinstance(content, list) else []
        text = parts[-1].get("text") if parts else content
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
        # If the tag has lost its space, the template trims messages, and would trim white space at the message's end.
        return kept if rendered.startswith(_CONTINUE_TAG, end) else kept.rstrip()

    def _content(self, content: Any) -> Any:
        only_parts = isinstance(content, str) and not self._takes_texts
        return [{"type": "text", "text": content}] if only_parts else content

    def _without_content(self, turn: Mapping[str, Any], null: Any) -> dict[str, Any]:
        """Return a copy of the message with null instead of absent or empty content."""
        if null is _LEFT_OUT:
            return {name: value for name, value in turn.items() if name != "content"}
        return {**turn, "content": self._content(null)}

    def _turn(self, message: ChatMessage) -> dict[str, Any]:
        """Return a copy of the message in the form that this template expects."""
        turn = dict(message)
        role, content = turn["role"], turn.get("content")
        # OpenAI's parts are one text. In tool messages, some model families give a list another meaning (GLM: several
        # results).
        if isinstance(content, list) and (not self._takes_parts or role == "tool"):
            if any(part["type"] == "image" for part in content):
                raise InvalidRequest("the model's chat template takes text only, and no images", param="messages")
            content = PART_JOINER.join(part["text"] for part in content)
        turn["content"] = self._content(content)
        if role == "developer" and not self._knows_developer:
            turn["role"] = "system"  # OpenAI's newer name for "system"
        reasoning = next(
            (turn[name] for name in ("reasoning_content", "reasoning") if turn.get(name) is not None), None
        )
        if reasoning is None:
            return turn
        turn["reasoning_content"] = reasoning
        # gpt-oss's template reads "thinking", and refuses a message with calls that has both "thinking" and text.
        return turn if turn.get("tool_calls") and content else {"thinking": reasoning, **turn}


def _content_names(tree: nodes.Template) -> frozenset[str]:
    """Return the variables with a message's content: `content`, and those that are assigned from it."""
    names = frozenset({"content"})
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names |= {assign.target.name}
    return names


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    """Return whether an expression is a message's content, possibly filtered or sliced."""
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
    """The {% generation %} tag, by which templates mark the model's output for training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # The block has its own scope, as in transformers: assignments in it have no effect after it.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _DictMaker:
    """The `dict` function in templates, without the attributes of the class."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """The `namespace` object of templates, without Python's underscore names."""

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
    """Return a Jinja environment with the additions and restrictions of transformers 5.24."""
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
