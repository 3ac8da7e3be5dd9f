"""Grammars for answers that must match a JSON schema or call tools, after optional reasoning.

The grammars use llguidance's Lark dialect, see https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.

A separate process first checks whether a schema can be enforced, because a check that takes too long must be killed.
Its verdict is cached.
"""

import asyncio
import json
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from libs.contracts.errors import QueueFull
from libs.dispatch.generation import RETRY_AFTER_S
from libs.dispatch.ports import Tenancy
from libs.model.closed_schema import closed
from libs.model.grammar import MAX_CPU_S, MAX_MEMORY_BYTES, choice_rule, json_rule
from services.gateway.answers.calls import (
    DeepSeekCalls,
    HermesCall,
    KimiCalls,
    MarkedCalls,
    Marks,
    MistralCalls,
    value_types,
)
from services.gateway.answers.families import CALLS, AnswerFormat
from services.gateway.turns import FairSlots

MAX_CHECKED = 256
"""The maximum number of schemas with a cached verdict."""
MAX_CHECKED_CHARS = 8 * 1024 * 1024
"""The maximum number of characters of all cached schemas, as sent by clients and as converted for llguidance."""
MAX_CHECKS = 2
"""The maximum number of concurrent checks. Each runs in its own process."""
MAX_WAITING = 32
"""The maximum number of schemas that wait for a check. Further ones are refused with status 429."""
# A bound on wall-clock time. A busy machine may be the cause, so the request gets status 429 and no verdict is cached.
MAX_CHECK_S = 20.0
_OUT_OF_TIME = (-signal.SIGKILL, -signal.SIGXCPU)
MAX_REASON_CHARS = 300


# A schema or a rule as JSON, and whether the schema's objects are closed to additional properties.
_Key = tuple[str, bool]


class SchemaVerdict(NamedTuple):
    fault: str
    """The reason for which the schema cannot be enforced; empty if it can be."""
    schema: str = "{}"
    """The schema as JSON, converted for llguidance. It is unused for a rule."""
    omitted: tuple[str, ...] = ()
    """JSON pointers to the keywords that the grammar does not enforce."""
    reason: str = ""
    """The reason for which the first omitted keyword cannot be enforced."""


class SchemaCheck:
    """A checker of schemas with a cache of verdicts."""

    def __init__(self, tenants: Tenancy | None = None) -> None:
        """Create the checker. Its slots are shared fairly by `tenants`; with None, all requests are treated alike."""
        self._verdicts: OrderedDict[_Key, SchemaVerdict] = OrderedDict()
        self._chars = 0
        full = f"{MAX_CHECKS} schemas are checked at a time, and too many are waiting: try again"
        self.slots = FairSlots(MAX_CHECKS, MAX_WAITING, full, tenants=tenants)
        self._checks: dict[tuple[str, _Key], asyncio.Lock] = {}
        """The locks of schemas whose check is running or waiting, by tenant and schema."""

    async def verdict(self, schema: str, tenant: str = "", *, close: bool = False) -> SchemaVerdict:
        """Return the verdict on a schema or a rule, given as JSON. Raise QueueFull if too many wait for a check.

        With `close`, the schema's objects are first closed to additional properties.
        """
        key = schema, close
        found = self._verdicts.get(key)
        if found is None:
            found = await self._check(key, tenant)
        else:
            self._verdicts.move_to_end(key)
        return found

    async def satisfied(self, pairs: Sequence[tuple[str, Mapping[str, Any]]], tenant: str = "") -> list[bool | None]:
        """Return, for each pair of a text and a schema, whether the text is an instance of the schema.

        The result is None if the check did not finish within its bounds. The request still gets its answer.
        """
        try:
            async with self.slots.slot(tenant):
                code, said = await _run("libs.model.instances", json.dumps(pairs))
        except QueueFull:
            code, said = -1, b""
        found: list[bool | None] = json.loads(said) if not code else [None] * len(pairs)
        return found

    async def _check(self, key: _Key, tenant: str) -> SchemaVerdict:
        """Check a schema. Concurrent requests of one tenant with the same schema share a single check."""
        schema, close = key
        async with self._checks.setdefault((tenant, key), asyncio.Lock()):
            found = self._verdicts.get(key)
            if found is not None:
                return found
            try:
                async with self.slots.slot(tenant):
                    found = await _ask(json.dumps(closed(json.loads(schema))) if close else schema)
            finally:
                self._checks.pop((tenant, key), None)
        # Another tenant's check of the same schema may have ended in the meantime.
        if key not in self._verdicts:
            self._verdicts[key] = found
            self._chars += _chars(key, found)
        while len(self._verdicts) > MAX_CHECKED or self._chars > MAX_CHECKED_CHARS:
            self._chars -= _chars(*self._verdicts.popitem(last=False))
        return found


def _chars(key: _Key, verdict: SchemaVerdict) -> int:
    schema, _ = key
    return len(schema) + len(verdict.fault) + len(verdict.schema) + sum(map(len, verdict.omitted))


async def _ask(schema: str) -> SchemaVerdict:
    code, said = await _run("libs.model.grammar", schema)
    if code in _OUT_OF_TIME:
        return SchemaVerdict(f"it takes more than {MAX_CPU_S} s to compile")
    if code > 0:
        raise RuntimeError(f"the check of a schema ended with {code}")
    if code:
        return SchemaVerdict(f"it takes more than {MAX_MEMORY_BYTES} bytes to compile")
    found = json.loads(said)
    fault, reason = (found[each][:MAX_REASON_CHARS] for each in ("fault", "reason"))
    return SchemaVerdict(fault, json.dumps(found["schema"]), tuple(found["omitted"]), reason)


async def _run(module: str, given: str) -> tuple[int, bytes]:
    """Run a Python module in a process of its own with `given` as its input. Return its exit code and output.

    Raise QueueFull if it exceeds MAX_CHECK_S.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(MAX_CHECK_S):
            said, _ = await child.communicate(given.encode())
    except TimeoutError:
        raise QueueFull("the schema could not be checked in time", retry_after_s=RETRY_AFTER_S) from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode is not None
    return child.returncode, said


_DEFINITIONS: Final = ("$defs", "definitions")
# The grammar does not enforce larger bounds on the length of a text.
_MAX_BOUND: Final = 4096


class Writer(Protocol):
    """A function that writes texts as terminals of a grammar."""

    def __call__(self, *texts: str) -> str: ...

    def until(self, closes: str, rule: str = ..., text: str = ...) -> str:
        """Return a terminal that matches any text up to and including `closes`."""
        ...


def marked_call(marks: Marks, write: Writer, place: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the rule `call_{place}` for a call of the tool `name`, and the rules of its arguments.

    The grammar allows each argument once, in the schema's order. Only the required ones must be present.
    """
    properties: Mapping[str, Any] = schema.get("properties") or {}
    rules, arguments = [], []
    for number, (key, value) in enumerate(properties.items()):
        rule = f"value_{place}_{number}"
        written = write(marks.key[0], key, marks.key[1], marks.line, marks.value[0])
        after = f"{marks.line}{marks.value[1]}"
        if "string" in value_types(value) and "enum" not in value:
            rules.append("")  # the writer keeps that rule
            argument = f"{written} {write.until(after, rule, _text(value))} {write(marks.line)}"
        else:
            rules.append(f"{rule}: {_value(value, schema)}")
            argument = f"{written} {rule} {write(after, marks.line)}"
        arguments.append(argument if key in schema.get("required", ()) else f"({argument})?")
    opens = (*marks.name[:1], name, marks.name[1], marks.line) if marks.name else (name, "\n")
    return [f"call_{place}: {write(*opens)} {' '.join(arguments)} {write(marks.ends)}", *filter(None, rules)]


def _text(schema: Any) -> str:
    most = schema.get("maxLength") if isinstance(schema, Mapping) else None
    least = schema.get("minLength", 0) if isinstance(schema, Mapping) else 0
    if not isinstance(most, int) or most > _MAX_BOUND or not isinstance(least, int) or least > most:
        return r"/(.|\n)*/"
    return rf"/(.|\n){{{least},{most}}}/"


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if values and all(isinstance(value, str) for value in values):
        return choice_rule(values)
    shared = {name: root[name] for name in _DEFINITIONS if name in root}
    return json_rule({**shared, **schema} if isinstance(schema, Mapping) else {})


ToolSchema = tuple[str, Mapping[str, Any]]
"""The name of a tool and the JSON schema of its arguments."""
# The texts around one call's arguments by tool name, the text between calls, and the texts around all calls.
_Form = tuple[Callable[[str], tuple[str, str]], str | None, tuple[str, str]]
_ANYTHING = r"/(.|\n)*/"


def guide_of(
    shape: AnswerFormat,
    special: Mapping[str, int],
    *,
    schema: Mapping[str, Any] | None,
    rule: str = "",
    tools: Sequence[ToolSchema],
    parallel: bool,
    thinks: bool,
) -> str:
    """Return the grammar of one answer.

    `special` maps the texts of special tokens to their ids, because models write their tags with special tokens.
    `schema` is None if the answer must consist of calls or match `rule`, the right-hand side of a grammar rule. With
    `thinks`, the prompt ends inside the reasoning.
    """
    write = _Writer(special)
    choices = []
    body = json_rule(schema) if schema is not None else rule
    if body:
        before = _harmony_final(write) if shape.harmony else ""
        choices.append(f"{before} body".strip())
    if tools:
        choices.append("calls")
    rules = [f"start: {_reasoning(shape, write, thinks)}({' | '.join(choices)})"]
    if body:
        rules.append(f"body: {body}")
    if tools:
        rules += _calls(shape, write, tools, parallel)
    return "\n".join(rules + write.rules) + "\n"


class _Writer:
    """A writer of texts as terminals. Special tokens are written by id."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self.rules: list[str] = []

    def __call__(self, *texts: str) -> str:
        return " ".join(
            f"<[{self._special[text]}]>" if text in self._special else json.dumps(text, ensure_ascii=False)
            for text in texts
            if text
        )

    def until(self, closes: str, rule: str = "thought", text: str = _ANYTHING) -> str:
        """Return a terminal that matches `text` up to and including `closes`.

        If `closes` is no special token, this adds a grammar rule with the name `rule`.
        """
        if closes in self._special:
            return f"{text} {self(closes)}"
        self.rules.append(f"{rule}[suffix={json.dumps(closes)}]: {text}")
        return rule

    def has(self, text: str) -> bool:
        return text in self._special


def _reasoning(shape: AnswerFormat, write: _Writer, thinks: bool) -> str:
    if shape.harmony:
        opens, closes = write("<|channel|>", "analysis", "<|message|>"), write("<|end|>", "<|start|>", "assistant")
        return f"({opens} {_ANYTHING} {closes})* "
    if shape.thinking is None:
        return ""
    thought = write.until(shape.thinking.closes) + r" /[ \n]{0,4}/"
    return f"{thought} " if thinks else f"({write(shape.thinking.opens)} {thought})? "


def _harmony_final(write: _Writer) -> str:
    return write("<|channel|>", "final", "<|message|>")


def _calls(shape: AnswerFormat, write: _Writer, tools: Sequence[ToolSchema], parallel: bool) -> list[str]:
    which = "call: " + " | ".join(f"call_{at}" for at in range(len(tools)))
    marked = CALLS.get(shape.calls)
    if marked is not None and issubclass(marked, MarkedCalls):
        return [*_marked_calls(marked, write, tools, parallel), which]
    form, between, around = _form(shape, write)
    many = f" ({between} call)*" if parallel and between is not None else ""
    before, after = around
    rules = [f"calls: {before} call{many} {after}", which]
    for place, (name, parameters) in enumerate(tools):
        opens, closes = form(name)
        rules += [f"call_{place}: {opens} args_{place} {closes}", f"args_{place}: {json_rule(parameters)}"]
    return rules


def _marked_calls(calls: type[MarkedCalls], write: _Writer, tools: Sequence[ToolSchema], parallel: bool) -> list[str]:
    line, marks = write("\n"), calls.marks
    before, after = write(calls.opens[0]), write(calls.specials[0])
    one = f"{before} call {after}" if marks.name is None else f"{before} {line} call {line} {after}"
    rules = [f"calls: {one}" + (f" ({line} {one})*" if parallel else "")]
    for place, (name, parameters) in enumerate(tools):
        rules += marked_call(marks, write, place, name, parameters)
    return rules


def _form(shape: AnswerFormat, write: _Writer) -> _Form:
    """Return a function from a tool's name to the texts around its arguments, the text between two calls, and the texts
    around all calls.

    The text between calls is None if the format allows only one call.
    """
    if shape.harmony:
        opens = ("<|channel|>", "commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>")
        return lambda name: (write(*(text.format(name=name) for text in opens)), ""), None, ("", "")
    if shape.calls == "hermes":
        tag, closes = HermesCall.opens[0], HermesCall.specials[0]
        return (
            lambda name: (write(tag, f'\n{{"name": "{name}", "arguments": '), write("}\n", closes)),
            write("\n"),
            ("", ""),
        )
    if shape.calls == "llama3-json":
        return lambda name: (write(f'{{"name": "{name}", "parameters": '), write("}")), write("; "), ("", "")
    if shape.calls == "mistral":
        tag = MistralCalls.opens[0]
        if write.has("[ARGS]"):
            return lambda name: (write(tag, name, "[ARGS]"), ""), "", ("", "")
        return (
            lambda name: (write(f'{{"name": "{name}", "arguments": '), write("}")),
            write(", "),
            (write(tag, "["), write("]")),
        )
    calls = KimiCalls if shape.calls == "kimi-k2" else DeepSeekCalls
    all_end, begin, sep, end = calls.specials
    around = (write(calls.opens[0]), write(all_end))
    if calls is KimiCalls:
        return lambda name: (f"{write(begin, f'functions.{name}:')} /[0-9]/ {write(sep)}", write(end)), "", around
    if shape.fenced:
        return (
            lambda name: (write(begin, "function", sep, f"{name}\n```json\n"), write("\n```", end)),
            write("\n"),
            around,
        )
    return lambda name: (write(begin, name, sep), write(end)), "", around
