"""Detection of a model's answer format from its special tokens and chat template, or from a setting. Pure."""

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
"""A setting's value for a model without such a format, whatever its template looks like."""

REASONING: Final[Mapping[str, Tags]] = MappingProxyType(
    {
        "think": Tags("<think>", "</think>"),  # Qwen3, QwQ, DeepSeek R1, GLM 4.5, SmolLM3, ...
        "mistral": Tags("[THINK]", "[/THINK]"),  # Magistral
        "seed": Tags("<seed:think>", "</seed:think>"),  # Seed-OSS
    }
)
"""The reasoning tags by family name in settings. A template that contains the closing tag belongs to the family."""

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
"""Texts in a template that identify its tool call format. The first format whose texts all occur is chosen."""
# Mistral's templates refuse call ids of another length.
MISTRAL_ID_CHARS: Final = 9
PROMPT_END_TOKENS: Final = 8
"""The number of tokens at a prompt's end that are searched for tags that open reasoning."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The way in which one model writes reasoning and tool calls."""

    harmony: bool = False
    thinking: Tags | None = None
    calls: str = ""
    """A key of CALLS, or "harmony"; empty if the format is unknown."""
    fenced: bool = False
    """Whether DeepSeek's arguments are in a block of JSON, as before V3.1."""

    @property
    def reasons(self) -> bool:
        """Return whether the model marks reasoning apart from content."""
        return self.harmony or self.thinking is not None

    def parser(self, tools: Tools, prompt_end: str) -> Parser | None:
        """Return a parser for one answer to a chat, or None if all of it is content. `tools` are those that may be
        called.
        """
        if self.harmony:
            return HarmonyParser(calls=bool(tools))
        calls = CALLS.get(self.calls) if tools else None
        if self.thinking is None and calls is None:
            return None
        return TaggedParser(self.thinking, calls, tools, thinks=self.thinks(prompt_end))

    def thinks(self, prompt_end: str) -> bool:
        """Return whether a prompt with this end has opened the reasoning."""
        return self.thinking is not None and prompt_end.rstrip().endswith(self.thinking.opens)


@dataclass(frozen=True, slots=True)
class FormatNames:
    """The formats configured by hand, by a model's name. "*" applies to all others."""

    reasoning: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, str] = field(default_factory=dict)

    def of(self, model: str) -> tuple[str, str]:
        """Return the names of a model's reasoning and call formats; empty if not set."""
        reasoning, tools = (names.get(model, names.get("*", "")) for names in (self.reasoning, self.tools))
        return reasoning, tools


NO_NAMES: Final = FormatNames()


def answer_format(tokenizer: Tokenizer, names: tuple[str, str] = ("", "")) -> AnswerFormat:
    """Return a model's format. `names`, its configured reasoning and call formats, override the tokenizer's."""
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
    """Return the text of a prompt's last tokens, including special ones."""
    return b"".join(map(tokenizer.token_bytes, prompt[-PROMPT_END_TOKENS:])).decode(errors="replace")


def _calls_of(template: str) -> str:
    return next((name for name, signs in _CALL_SIGNS if all(sign in template for sign in signs)), "")
