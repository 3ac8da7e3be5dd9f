"""Answers in each model family's published format, and what a client receives of them."""

from dataclasses import dataclass
from itertools import groupby

from libs.model.tokenizer import Tokenizer
from services.gateway.answers.calls import (
    DeepSeekCalls,
    GlmCalls,
    HermesCall,
    KimiCalls,
    MiniMaxCalls,
    MistralCalls,
    QwenCoderCalls,
    SeedCalls,
)
from services.gateway.answers.families import AnswerFormat
from services.gateway.answers.parts import AnswerReader, PartKind

TOOLS = {
    "get_weather": {
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}}
    },
    "search": {"properties": {"query": {"type": "string"}}},
    "now": {},
}
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
Shown = list[tuple[str, str]]


@dataclass(frozen=True)
class Stream:
    """An answer, and what a client receives of it."""

    sign: str
    """The part of the family's template that identifies its format."""
    marks: tuple[str, ...]
    """Its tags, each of which is a token of its vocabulary."""
    text: str
    shown: Shown
    thinks: str = ""
    """The tag that ends its prompt, if that opens the reasoning."""


def calls(*found: tuple[str, str]) -> Shown:
    """Return the name and arguments of each call."""
    return [part for name, arguments in found for part in (("CALL", name), ("ARGUMENTS", arguments))]


HERMES_SIGN = "<tool_call>"
WEATHER = '{"city": "München", "days": 3, "metric": true}'
SEARCH = '{"query": "a \\"quoted\\" </tool_call> \\u00e9 \\\\"}'
STREAMS: dict[str, Stream] = {
    "gpt-oss": Stream(
        "", HARMONY,
        "<|channel|>analysis<|message|>See 天気.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        f"<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}"
        f"<|call|>",
        [("REASONING", "See 天気.I look."), *calls(("get_weather", WEATHER))],
    ),
    "Qwen3": Stream(
        f"{HERMES_SIGN} </think>", ("<think>", "</think>", *HermesCall.opens, *HermesCall.specials),
        f'<think>\nStädte → two.\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n'
        f'</tool_call>\n<tool_call>\n{{"name": "search", "arguments": {SEARCH}}}\n</tool_call>',
        [("REASONING", "Städte → two."), *calls(("get_weather", WEATHER), ("search", SEARCH))],
    ),
    "Qwen3, thinking opened by the prompt": Stream(
        f"{HERMES_SIGN} </think>", ("<think>", "</think>", *HermesCall.opens, *HermesCall.specials),
        'Which?\n</think>\n\nLet me see.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [("REASONING", "Which?"), ("CONTENT", "Let me see."), *calls(("now", "{}"))],
        thinks="<think>\n",
    ),
    "Hermes 3": Stream(
        HERMES_SIGN, (*HermesCall.opens, *HermesCall.specials),
        f'<tool_call>\n{{"arguments": {WEATHER}, "name": "get_weather"}}\n</tool_call>',
        calls(("get_weather", WEATHER)),
    ),
    "Llama 3.1": Stream(
        '"name": function name, "parameters":', ("<|python_tag|>",),
        f'{{"name": "get_weather", "parameters": {WEATHER}}}', calls(("get_weather", WEATHER)),
    ),
    "Llama 3.3, two calls after its tag": Stream(
        '"name": function name, "parameters":', ("<|python_tag|>",),
        f'<|python_tag|>{{"name": "search", "parameters": {SEARCH}}}; {{"name": "now", "parameters": {{}}}}',
        calls(("search", SEARCH), ("now", "{}")),
    ),
    "Mistral 7B v0.3": Stream(
        "[TOOL_CALLS]", MistralCalls.opens,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, '
        f'{{"arguments": {SEARCH}, "name": "search"}}]',
        calls(("get_weather", WEATHER), ("search", SEARCH)),
    ),
    "Mistral Small 3.2": Stream(
        "[TOOL_CALLS]", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        f"I look.[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{WEATHER}[TOOL_CALLS]now[CALL_ID]Z9y8X7w6V[ARGS]{{}}",
        [("CONTENT", "I look."), *calls(("get_weather", WEATHER), ("now", "{}"))],
    ),
    "Magistral": Stream(
        "[TOOL_CALLS] [/THINK]", ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        f"[THINK]Météo ?[/THINK][TOOL_CALLS]get_weather[ARGS]{WEATHER}",
        [("REASONING", "Météo ?"), *calls(("get_weather", WEATHER))],
    ),
    "DeepSeek V3": Stream(
        "<｜tool▁calls▁begin｜> ```json", (*DeepSeekCalls.opens, *DeepSeekCalls.specials),
        "Ich sehe nach.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{WEATHER}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("CONTENT", "Ich sehe nach."), *calls(("get_weather", WEATHER), ("now", "{}"))],
    ),
    "DeepSeek V3.1, thinking": Stream(
        "<｜tool▁calls▁begin｜> </think>", ("<think>", "</think>", *DeepSeekCalls.opens, *DeepSeekCalls.specials),
        f"Two.</think>One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{WEATHER}"
        f"<｜tool▁call▁end｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{SEARCH}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [
            ("REASONING", "Two."), ("CONTENT", "One moment."),
            *calls(("get_weather", WEATHER), ("search", SEARCH)),
        ],
        thinks="<think>",
    ),
    "Kimi K2": Stream(
        "<|tool_calls_section_begin|>", (*KimiCalls.opens, *KimiCalls.specials),
        "I look. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{WEATHER}<|tool_call_end|><|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{SEARCH}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [("CONTENT", "I look."), *calls(("get_weather", WEATHER), ("search", SEARCH))],
    ),
    "Qwen3-Coder": Stream(
        "<tool_call> <function=", (*QwenCoderCalls.opens, *QwenCoderCalls.specials),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nMünchen\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=metric>\ntrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=search>\n"
        '<parameter=query>\ndef f(a):\n    return a < 3 and "</x>"\n</parameter>\n</function>\n</tool_call>',
        calls(
            ("get_weather", WEATHER),
            ("search", '{"query": "def f(a):\\n    return a < 3 and \\"</x>\\""}'),
        ),
    ),
    "GLM 4.5": Stream(
        "<tool_call> <arg_key> </think>", ("<think>", "</think>", *GlmCalls.opens, *GlmCalls.specials),
        "<think>查一下</think>I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>München"
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        [("REASONING", "查一下"), ("CONTENT", "I look."), *calls(("get_weather", WEATHER), ("now", "{}"))],
    ),
    "GLM 4.6, on one line": Stream(
        "<tool_call> <arg_key>", (*GlmCalls.opens, *GlmCalls.specials),
        "<tool_call>search<arg_key>query</arg_key><arg_value>1 < 2</arg_value></tool_call>",
        calls(("search", '{"query": "1 < 2"}')),
    ),
    "MiniMax M2": Stream(
        "<minimax:tool_call> </think>", ("<think>", "</think>", *MiniMaxCalls.opens, *MiniMaxCalls.specials),
        'Both.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">München'
        '</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="metric">true</parameter>\n</invoke>\n'
        '<invoke name="search">\n<parameter name="query">x > y</parameter>\n</invoke>\n</minimax:tool_call>',
        [("REASONING", "Both."), *calls(("get_weather", WEATHER), ("search", '{"query": "x > y"}'))],
        thinks="<think>\n",
    ),
    "Seed-OSS": Stream(
        "<seed:tool_call> </seed:think>",
        ("<seed:think>", "</seed:think>", *SeedCalls.opens, *SeedCalls.specials),
        "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>München</parameter>\n"
        "<parameter=days>3</parameter>\n<parameter=metric>true</parameter>\n</function>\n</seed:tool_call>",
        [("REASONING", "Hm."), *calls(("get_weather", WEATHER))],
    ),
    "SmolLM3, no call": Stream(
        f"{HERMES_SIGN} </think>", ("<think>", "</think>"),
        "<think>\nEasy.\n</think>\nIt is 4 — <b>four</b>.",
        [("REASONING", "Easy."), ("CONTENT", "It is 4 — <b>four</b>.")],
    ),
}  # fmt: skip


def shown(tokenizer: Tokenizer, shape: AnswerFormat, stream: Stream, tokens: list[int]) -> Shown:
    """Return the parts with adjacent ones joined and calls separate."""
    parser = shape.parser(TOOLS, stream.thinks)
    assert parser is not None
    reader = AnswerReader(parser, tokenizer.decoder(), tokenizer.special_tokens)
    parts = [part for token in tokens for part in reader.token(token)] + reader.end()
    numbered = [
        (part.kind, number if part.kind is PartKind.CALL else -1, part.text) for number, part in enumerate(parts)
    ]
    return [
        (kind.name, "".join(text for _, _, text in same))
        for (kind, _), same in groupby(numbered, lambda each: each[:2])
    ]
