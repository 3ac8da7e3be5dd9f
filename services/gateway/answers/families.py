"""Which format a model answers in: by its special tokens and its chat template, or by a setting. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from libs.model.tokenizer import Tokenizer
from services.gateway.answers.calls import DeepSeekCalls, HermesCall, KimiCalls, LlamaCalls, MistralCalls
from services.gateway.answers.harmony import MARKERS, HarmonyParser
from services.gateway.answers.marked_calls import GlmCalls, MiniMaxCalls, QwenCoderCalls, SeedCalls, Tools
from services.gateway.answers.parts import Parser
from services.gateway.answers.tagged import CallFormat, TaggedParser, Tags

HARMONY: Final = "harmony"
NONE: Final = "none"
"""In a setting: the model has no such format, whatever its template looks like."""

REASONING: Final[Mapping[str, Tags]] = MappingProxyType(
    {
        "think": Tags("<think>", "</think>"),  # Qwen3, QwQ, DeepSeek R1, GLM 4.5, SmolLM3, ...
        "mistral": Tags("[THINK]", "[/THINK]"),  # Magistral
        "seed": Tags("<seed:think>", "</seed:think>"),  # Seed-OSS
    }
)
"""Families by their name in settings; a template that writes the closing tag is of that family."""

CALLS: Final[Mapping[str, CallFormat]] = MappingProxyType(
    {
        "deepseek": DeepSeekCalls,
        "kimi-k2": KimiCalls,
        "mistral": MistralCalls,
        "minimax-m2": MiniMaxCalls,
        "seed-oss": SeedCalls,
        "qwen3-coder": QwenCoderCalls,
        "glm": GlmCalls,
        "hermes": HermesCall,
        "llama3-json": LlamaCalls,
    }
)
_CALL_SIGNS: Final = (
    ("deepseek", DeepSeekCalls.opens),
    ("kimi-k2", KimiCalls.opens),
    ("mistral", MistralCalls.opens),
    ("minimax-m2", MiniMaxCalls.opens),
    ("seed-oss", SeedCalls.opens),
    ("qwen3-coder", (*QwenCoderCalls.opens, "<function=")),
    ("glm", (*GlmCalls.opens, "<arg_key>")),
    ("hermes", HermesCall.opens),
    ("llama3-json", ('"name": function name, "parameters":',)),
)
"""What a template says of the format that its model calls tools in; the first of which all is there."""
MISTRAL_ID_CHARS: Final = 9
"""Their templates refuse other ids of calls."""
PROMPT_END_TOKENS: Final = 8
"""The tags that open reasoning are found in this many tokens at a prompt's end."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one model writes reasoning and tool calls."""

    harmony: bool = False
    thinking: Tags | None = None
    calls: str = ""
    """Key of CALLS, or "harmony"; empty: no format that is known."""
    fenced: bool = False
    """Whether DeepSeek's arguments stand in a block of JSON, as before V3.1."""

    @property
    def reasons(self) -> bool:
        """Whether reasoning stands apart from content."""
        return self.harmony or self.thinking is not None

    def parser(self, tools: Tools, prompt_end: str) -> Parser | None:
        """For one answer to a chat; None where all of it is content. `tools`: those that may be called."""
        if self.harmony:
            return HarmonyParser(calls=bool(tools))
        calls = CALLS.get(self.calls) if tools else None
        if self.thinking is None and calls is None:
            return None
        return TaggedParser(self.thinking, calls, tools, thinks=self.thinks(prompt_end))

    def thinks(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has opened the reasoning."""
        return self.thinking is not None and prompt_end.rstrip().endswith(self.thinking.opens)


@dataclass(frozen=True, slots=True)
class FormatNames:
    """Formats by hand, by a model's name; "*" stands for all others."""

    reasoning: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)

    def of(self, model: str) -> tuple[str, str]:
        """Names of its formats of reasoning and of calls; empty where none is set."""
        reasoning, tools = (names.get(model, names.get("*", "")) for names in (self.reasoning, self.tools))
        return reasoning, tools


NO_NAMES: Final = FormatNames()


def answer_format(tokenizer: Tokenizer, names: tuple[str, str] = ("", "")) -> AnswerFormat:
    """Format of a model by its tokenizer; `names`: of its formats of reasoning and of calls by hand, which come
    first."""
    reasoning, tools = names
    special = set(tokenizer.special_tokens.values())
    harmony = special.issuperset(MARKERS) and reasoning in ("", HARMONY)
    if harmony:
        return AnswerFormat(harmony=True, calls="" if tools == NONE else HARMONY)
    template = tokenizer.template_text
    by_template = (tags for tags in REASONING.values() if tags.closes in template)
    thinking = REASONING.get(reasoning) if reasoning else next(by_template, None)
    calls = (tools or _calls_of(template)).replace(NONE, "")
    return AnswerFormat(thinking=thinking, calls=calls, fenced="```json" in template)


def prompt_end(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """Text of a prompt's last tokens, special ones included."""
    return b"".join(map(tokenizer.token_bytes, prompt[-PROMPT_END_TOKENS:])).decode(errors="replace")


def _calls_of(template: str) -> str:
    return next((name for name, signs in _CALL_SIGNS if all(sign in template for sign in signs)), "")
