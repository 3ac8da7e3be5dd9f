"""The served models, the tokens of prompts, and the look-up of prompts' prefixes in the KV index.

Long texts are encoded in a thread pool. All prompts that arrive in one turn of the event loop share one look-up.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from zlib import crc32

from libs.contracts.errors import (
    ContextTooLong,
    InvalidRequest,
    NoWorkers,
    StartupError,
    UnknownModel,
    UnsupportedField,
    quoted,
)
from libs.contracts.hashing import ImageSpan, block_hashes, chain_root
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import PHASE_BOTH, PHASE_DECODE, PHASE_PREFILL
from libs.model.chat import ChatMessage
from libs.model.info import ModelInfo, PairTokens, load_model_info
from libs.model.tokenizer import Tokenizer, load_tokenizer, read_template
from libs.policy.roles import serves
from libs.runtime.tasks import TaskOwner
from libs.stores.kvindex import KvIndex, PrefixQuery, probes
from services.gateway.answers.families import NO_NAMES, AnswerFormat, FormatNames, answer_format
from services.gateway.fleet import WorkerLinks
from services.gateway.images.files import check_vision, expanded
from services.gateway.request import tool_text
from services.gateway.request.parse import ParsedRequest, Prompt

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
# The maximum number of models that an error message lists.
MAX_NAMED = 20


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    tokenizer: Tokenizer
    ttft_ms: float | None = None
    """The TTFT target of requests that specify none; None applies the gateway's."""
    tpot_ms: float | None = None
    names: FormatNames = NO_NAMES
    """The configured answer formats, which override detection."""
    base: str = ""
    """The name of the base model whose workers serve this adapter; empty for a base model."""
    adapter_source: str = ""
    """The folder of an adapter that the catalogue added; empty if workers load the adapter when they start."""
    format: AnswerFormat = field(init=False)

    @property
    def routed(self) -> str:
        return self.base or self.info.name

    @property
    def adapter_name(self) -> str:
        """The name by which clients request the adapter; empty for a base model."""
        return self.info.name if self.base else ""

    @property
    def adapter(self) -> str:
        """The name of the adapter on workers; empty for a base model."""
        if not self.base:
            return ""
        # Includes the source: an adapter that is added again from another folder must not reuse the KV of the former
        # one.
        return f"{self.info.name}@{crc32(self.adapter_source.encode()):08x}" if self.adapter_source else self.info.name

    def __post_init__(self) -> None:
        names = self.names.of(self.info.name)
        found = answer_format(self.tokenizer, names)
        if self.names.as_text and not (found.harmony or names[1] or self.tokenizer.takes("tools")):
            found = replace(found, calls=tool_text.FORMAT)
        object.__setattr__(self, "format", found)


class Catalog:
    def __init__(self, models: Iterable[ServedModel], format_names: FormatNames = NO_NAMES) -> None:
        # Used for models that are added later.
        self.format_names = format_names
        self._models: Mapping[str, ServedModel] = {model.info.name: model for model in models}
        self.own = dict(self._models)
        """The models in the settings, which are never removed."""
        self.names = list(self._models)
        """The names of the models in the settings, then those of added models. The list is only changed in place."""

        self.broken: dict[str, str] = {}
        """The added models that cannot be served here, with the reason."""

    def replace_added(self, models: Iterable[ServedModel]) -> None:
        """Replace all models that were added before. The models in the settings stay."""
        self._models = {**{model.info.name: model for model in models}, **self.own}
        self.names[:] = [*self.own, *sorted(self._models.keys() - self.own.keys())]

    def get(self, name: str) -> ServedModel:
        return self.need(name, frozenset())

    def need(self, name: str, allowed: AbstractSet[str]) -> ServedModel:
        """Return the model. An empty set of `allowed` models allows all.

        Raise NoWorkers if the model's files are broken, or else UnknownModel. The error does not reveal whether a model
        exists that is not allowed.
        """
        is_allowed = not allowed or name in allowed
        model = self._models.get(name) if is_allowed else None
        if model is None and is_allowed and name in self.broken:
            raise NoWorkers(f"model {quoted(name)} cannot be served here: {self.broken[name]}")
        if model is None:
            named = [each for each in self.names if not allowed or each in allowed][:MAX_NAMED]
            raise UnknownModel(
                f"model {quoted(name)} is not served; there are {', '.join(named) or 'none'}", param="model"
            )
        return model


def load_catalog(
    folders: Mapping[str, str], names: FormatNames = NO_NAMES, adapters: Mapping[str, str] = _NONE
) -> Catalog:
    """Load the models in `folders` (folder by name) and their `adapters` (base model by name). Raise StartupError."""
    for file in names.templates.values():  # including those that only a model from the catalogue will use
        read_template(file)
    infos = [load_model_info(folder, name) for name, folder in folders.items()]
    models = {
        info.name: ServedModel(info, load_tokenizer(info, names.template(info.name)), names=names) for info in infos
    }
    for name, base in adapters.items():
        own = models.get(base)
        if own is None or own.base or name in models:
            raise StartupError(
                f"FULCRUM_GATEWAY_ADAPTERS: {name} is to be an adapter of {base}, which FULCRUM_GATEWAY_MODELS"
                f" {'does not name' if own is None else 'cannot give it: names must differ'}"
            )
        models[name] = replace(own, info=replace(own.info, name=name), base=base)
    return Catalog(models.values(), names)


# Prompts up to this length are encoded on the event loop, because handing them to a thread would take longer.
INLINE_CHARS = 4096
# The template variables that switch reasoning on: that of Qwen3 and GLM, and that of DeepSeek V3.1.
_SWITCHES = ("enable_thinking", "thinking")
# gpt-oss accepts low, medium and high only.
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
# The bound on the logprobs of one prompt with alternatives, because the worker sends them all in one frame.
MAX_SCORES = 262_144
# Added to the length of each message for the marks that the template writes around it.
MESSAGE_CHARS = 64


async def tokenise(
    parsed: ParsedRequest,
    model: ServedModel,
    threads: Executor,
    *,
    most_tokens: int | None = None,
    slot: Callable[[int], AbstractAsyncContextManager[None]] = lambda _chars: nullcontext(),
) -> list[list[int]]:
    """Return the token ids of each prompt. Raise InvalidRequest, which names the field.

    Prompts that certainly have `most_tokens` or more are refused before they are fully encoded. Long prompts are
    encoded in a thread while the context of `slot`, called with the number of characters, is open.
    """
    check_chat(parsed, model)
    # Before rendering, because each message has at least one token.
    if len(parsed.messages) >= model.info.max_context_tokens:
        text = f"{len(parsed.messages)} messages do not fit a context of {model.info.max_context_tokens} tokens"
        raise ContextTooLong(text, param=parsed.prompt_field)
    if parsed.images:
        check_vision(parsed.images, model.info.name, model.info.vision)
    chars = _chars(parsed)
    if chars <= INLINE_CHARS:
        return _encode(parsed, model, most_tokens)
    async with slot(chars):
        return await asyncio.get_running_loop().run_in_executor(threads, _encode, parsed, model, most_tokens)


def check_fit(parsed: ParsedRequest, prompts: list[list[int]], model: ServedModel, max_context_tokens: int) -> int:
    """Return the maximum number of output tokens for each choice.

    Raise InvalidRequest if a prompt does not fit. Pure.
    """
    vocab_size = model.info.vocab_size
    beyond = next((token for token in parsed.sampling.logit_bias if token >= vocab_size), None)
    if beyond is not None:
        text = f"logit_bias: '{beyond}' is beyond the vocabulary's {vocab_size} tokens"
        raise InvalidRequest(text, param="logit_bias")
    beyond = next((token for token in parsed.sampling.stop_token_ids if token >= vocab_size), None)
    if beyond is not None:
        text = f"stop_token_ids: {beyond} is beyond the vocabulary's {vocab_size} tokens"
        raise InvalidRequest(text, param="stop_token_ids")
    longest = max(len(prompt) for prompt in prompts)
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest(f"{parsed.prompt_field} has no tokens", param=parsed.prompt_field)
        if max(prompt) >= vocab_size or min(prompt) < 0:
            text = f"{parsed.prompt_field} has a token outside the vocabulary's {vocab_size}"
            raise InvalidRequest(text, param=parsed.prompt_field)
    if longest >= max_context_tokens:
        text = f"the prompt's {longest} tokens leave no room in a context of {max_context_tokens - model.info.encodes}"
        raise ContextTooLong(text, param=parsed.prompt_field)
    most = 1 + (parsed.prompt_logprobs or 0)
    if parsed.prompt_logprobs is not None and longest * most > MAX_SCORES:
        text = f"{longest} prompt tokens with {most} logprobs each are over {MAX_SCORES}"
        raise InvalidRequest(text, param="echo" if parsed.echo else "prompt_logprobs")
    if parsed.max_tokens is None:
        return max_context_tokens - longest
    if longest + parsed.max_tokens > max_context_tokens:
        text = f"{longest} prompt tokens and {parsed.max_tokens} more exceed the context of {max_context_tokens}"
        raise ContextTooLong(text, param=parsed.max_tokens_field)
    return parsed.max_tokens


def check_chat(parsed: ParsedRequest, model: ServedModel) -> None:
    """Raise UnsupportedField if the request has a field that the model's chat template does not support. Pure."""
    name, takes = model.info.name, model.tokenizer.takes
    if (field := _unshown_tools(parsed, model)) and not model.names.as_text:
        text = (
            f"{field}: tools are not served for model {name!r}, as its chat template takes none: use a model whose"
            " template does, put such a chat_template.jinja into its folder, or set FULCRUM_GATEWAY_TOOLS_AS_TEXT"
        )
        raise UnsupportedField(text, param=field)
    if field == "tools" and model.format.calls not in ("", tool_text.FORMAT):
        text = (
            f"tools: they are not served for model {name!r}: its chat template takes none, and as text they are called"
            f" in {tool_text.FORMAT}, not in {model.format.calls}"
        )
        raise UnsupportedField(text, param="tools")
    if field and parsed.continues and _is_written(parsed.messages[-1]):
        text = "continue_final_message: the last message holds calls or results, which are written as text"
        raise UnsupportedField(text, param="continue_final_message")
    if parsed.tools and not model.format.calls:
        text = (
            f"tools are not served for model {name!r}: how it calls them is not known, set FULCRUM_GATEWAY_TOOL_FORMATS"
        )
        raise UnsupportedField(text, param="tools")
    if any(map(takes, ("reasoning_effort", *_SWITCHES))):
        return
    if parsed.thinking is not None and parsed.thinking != model.format.reasons:
        text = f"thinking is not served for model {name!r}: it {'never thinks' if parsed.thinking else 'always thinks'}"
        raise UnsupportedField(text, param="thinking")
    if parsed.effort is None or parsed.effort_is_hint:
        return
    if parsed.effort != "none" or model.format.reasons:
        text = f"reasoning_effort is not served for model {name!r}: its chat template takes none"
        raise UnsupportedField(text, param="reasoning_effort")


def _unshown_tools(parsed: ParsedRequest, model: ServedModel) -> str:
    """Return the first field with tools, calls or results that the chat template would omit, or an empty string."""
    if parsed.tools and not model.tokenizer.takes("tools"):
        return "tools"
    names = partial(model.tokenizer.names, tools=bool(parsed.tools))
    shows_calls = names("tool_calls")
    shows_results = shows_calls or names("tool")
    for place, message in enumerate(parsed.messages):
        if message.get("tool_calls") and not shows_calls:
            return parsed.chat_field or f"messages[{place}].tool_calls"
        if message["role"] == "tool" and not shows_results:
            return parsed.chat_field or f"messages[{place}]"
    return ""


def _is_written(message: ChatMessage) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def gives_tools_as_text(parsed: ParsedRequest, model: ServedModel) -> bool:
    """Return whether tools, calls or results are written as text because the chat template would omit them."""
    return model.names.as_text and bool(_unshown_tools(parsed, model))


def _render(parsed: ParsedRequest, model: ServedModel) -> str:
    messages: Sequence[ChatMessage] = parsed.messages
    tools: Sequence[Mapping[str, Any]] = parsed.tools.tools if parsed.tools else ()
    if gives_tools_as_text(parsed, model):
        native = model.tokenizer.takes("tools")
        messages = tool_text.as_text(
            messages, () if native else tools, shows_system=native or model.tokenizer.shows_system
        )
        tools = tools if native else ()
    try:
        return model.tokenizer.render_chat(
            messages,
            tools=tools,
            variables={**_efforts(parsed, model), **parsed.template_variables},
            opens_answer=parsed.opens_answer,
            continues=parsed.continues,
        )
    except InvalidRequest as error:
        if error.param == "messages" and parsed.chat_field:
            raise InvalidRequest(error.message, param=parsed.chat_field) from None
        raise


def _efforts(parsed: ParsedRequest, model: ServedModel) -> dict[str, Any]:
    """Return the template variables that set the reasoning effort or switch reasoning on or off."""
    asks = parsed.effort
    if asks is None and parsed.thinking is False:
        asks = "none"
    if asks is None:
        found: dict[str, Any] = {} if parsed.thinking is None else dict.fromkeys(_SWITCHES, True)
    else:
        effort = _HARMONY_EFFORTS.get(asks, asks) if model.format.harmony else asks
        found = {"reasoning_effort": effort, **dict.fromkeys(_SWITCHES, asks != "none")}
    return {name: value for name, value in found.items() if model.tokenizer.takes(name)}


def _chars(parsed: ParsedRequest) -> int:
    """Return the approximate number of characters to render and encode."""
    chat = sum(MESSAGE_CHARS + _content_chars(message) + len(message.get("name", "")) for message in parsed.messages)
    for message in parsed.messages:
        if message["role"] == "assistant":
            chat += len(message.get("reasoning_content", "")) + len(message.get("reasoning", ""))
            chat += sum(len(str(call["function"]["arguments"])) for call in message.get("tool_calls", ()))
    tools = parsed.tools.chars if parsed.tools else 0
    texts = (each for each in parsed.prompts if not isinstance(each, list))
    return chat + tools + sum(len(each) if isinstance(each, str) else sum(map(len, each)) for each in texts)


def _content_chars(message: ChatMessage) -> int:
    content = message["content"]
    return sum(len(part.get("text", "")) for part in content) if isinstance(content, list) else len(content or "")


def _encode(parsed: ParsedRequest, model: ServedModel, most_tokens: int | None) -> list[list[int]]:
    if not parsed.messages:
        return [_encode_prompt(each, parsed, model, most_tokens) for each in parsed.prompts]
    text = _render(parsed, model)
    _check_length(text, parsed, model, most_tokens)
    # The template has already placed the special tokens.
    prompt, own = model.tokenizer.encode(text, add_special_tokens=False), model.tokenizer.added_tokens
    return [expanded(prompt, len(parsed.images), model.info.vision, own) if parsed.images else prompt]


def _encode_prompt(prompt: Prompt, parsed: ParsedRequest, model: ServedModel, most_tokens: int | None) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    for text in (prompt,) if isinstance(prompt, str) else prompt:
        _check_length(text, parsed, model, most_tokens)
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt, add_special_tokens=not parsed.raw)
    return PairTokens(*model.tokenizer.encode_pair(*prompt))


def _check_length(text: str, parsed: ParsedRequest, model: ServedModel, most_tokens: int | None) -> None:
    """Raise ContextTooLong if the text certainly has `most_tokens` or more."""
    if most_tokens is not None and model.tokenizer.has_more(text, most_tokens - 1):
        reason = f"{len(text)} characters leave no room in a context of {most_tokens - model.info.encodes} tokens"
        raise ContextTooLong(f"the prompt's {reason}", param=parsed.prompt_field)


MAX_PROBES = 64
"""The maximum number of blocks of one prompt to look up. In longer prompts, they are evenly spaced."""
# Longer prompts are hashed in a thread (8,192 tokens take about half a millisecond).
INLINE_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class _Kind:
    """The worker properties that enter block hashes. Workers of one kind have equal hashes for equal prompts."""

    model_revision: str
    kv_layout: str
    block_size_tokens: int


class _PrefixLookup(NamedTuple):
    model: str
    prompt: Sequence[int]
    salt: str
    adapter: str
    images: Sequence[ImageSpan] = ()


@dataclass(frozen=True, slots=True)
class _PromptQuery:
    kind: _Kind
    model: str
    workers: Sequence[str]
    depths: Sequence[int]
    """The number of leading blocks that each looked-up hash covers, in ascending order."""
    hashes: Sequence[bytes]
    found: dict[str, int]
    """The number of cached tokens by worker id. `fill` adds to it."""

    def fill(self, held: Mapping[str, int]) -> None:
        """Convert the number of leading hashes found for each worker into cached tokens."""
        for worker, count in held.items():
            self.found[worker] = self.depths[count - 1] * self.kind.block_size_tokens


class PrefixHints:
    """The look-up of prompts' prefixes in the KV index. An index that cannot be reached is treated as empty."""

    def __init__(
        self, index: KvIndex, fleet: WorkerLinks, tasks: TaskOwner, threads: Executor, *, max_hold_ms: float
    ) -> None:
        """Create the look-up. A request waits at most `max_hold_ms`. The dispatcher can still use a later answer."""
        self._max_hold_s = max_hold_ms / 1000
        self._index = index
        self._fleet = fleet
        self._tasks = tasks
        self._threads = threads
        self._pending: list[_PromptQuery] = []
        self._look_up: asyncio.Task[None] | None = None
        self.late = 0
        """The number of requests that were queued before their look-up was answered."""

    async def cached_tokens(
        self, model: str, prompt: Sequence[int], salt: str, adapter: str = "", images: Sequence[ImageSpan] = ()
    ) -> dict[str, int]:
        """Return the number of leading prompt tokens, images included, that each worker has cached, by worker id.

        Answers that arrive after `max_hold_ms` are added to the same dict. `salt` is that of the tenant. The result is
        empty, without a look-up, if no phase has several workers.
        """
        found: dict[str, int] = {}
        kinds = self._kinds(model)
        if not kinds:
            return found
        lookup = _PrefixLookup(model, prompt, salt, adapter, images)
        if len(prompt) <= INLINE_TOKENS:
            task = self._join(_prompts(kinds, lookup, found))
        else:
            task = self._tasks.spawn("hash prompt", self._hash_and_join(kinds, lookup, found))
        # A client that leaves must not cancel the others' look-up; `wait` cancels nothing.
        _, late = await asyncio.wait({task}, timeout=self._max_hold_s)
        self.late += len(late)
        return found

    async def _hash_and_join(
        self, kinds: Mapping[_Kind, list[str]], lookup: _PrefixLookup, found: dict[str, int]
    ) -> None:
        loop = asyncio.get_running_loop()
        await self._join(await loop.run_in_executor(self._threads, _prompts, kinds, lookup, found))

    def _join(self, prompts: list[_PromptQuery]) -> "asyncio.Task[None]":
        self._pending += prompts
        if self._look_up is None:
            self._look_up = self._tasks.spawn("prefix look-up", self._look_up_pending())
        return self._look_up

    async def _look_up_pending(self) -> None:
        """Look up all prompts of this turn of the event loop in one round trip."""
        await asyncio.sleep(0)
        prompts, self._pending, self._look_up = self._pending, [], None
        groups: dict[tuple[str, _Kind], list[_PromptQuery]] = {}
        for prompt in prompts:
            groups.setdefault((prompt.model, prompt.kind), []).append(prompt)
        queries = [
            PrefixQuery(model, [prompt.hashes for prompt in group], group[0].workers)
            for (model, _), group in groups.items()
        ]
        answers = await self._index.longest_prefix(queries)
        for group, answer in zip(groups.values(), answers, strict=True):
            for prompt, held in zip(group, answer, strict=True):
                prompt.fill(held)

    def _kinds(self, model: str) -> dict[_Kind, list[str]]:
        """Return the ids of the model's workers by kind; empty if neither phase has several workers to choose from."""
        kinds: dict[_Kind, list[str]] = {}
        prompts = decodes = 0
        for link in self._fleet.links:
            worker = link.worker
            if worker is None or worker.assignment.model != model or worker.state != WORKER_STATE_READY:
                continue
            prompts += serves(worker.assignment, PHASE_PREFILL) or serves(worker.assignment, PHASE_BOTH)
            decodes += serves(worker.assignment, PHASE_DECODE)
            capabilities = worker.capabilities
            kind = _Kind(worker.model_revision, capabilities.kv_layout, capabilities.block_size_tokens)
            kinds.setdefault(kind, []).append(worker.id)
        return kinds if prompts > 1 or decodes > 1 else {}


def _prompts(kinds: Mapping[_Kind, list[str]], lookup: _PrefixLookup, found: dict[str, int]) -> list[_PromptQuery]:
    """Return the hashes of the prompt's blocks for each kind of worker."""
    prompts: list[_PromptQuery] = []
    for kind, workers in kinds.items():
        root = chain_root(
            model_revision=kind.model_revision,
            kv_layout=kind.kv_layout,
            adapter=lookup.adapter,
            tenant_salt=lookup.salt,
        )
        hashes = block_hashes(root, lookup.prompt, kind.block_size_tokens, lookup.images)
        depths = probes(len(hashes), MAX_PROBES)
        prompts.append(
            _PromptQuery(kind, lookup.model, workers, depths, [hashes[depth - 1] for depth in depths], found)
        )
    return prompts
