"""The answers of chats and text completions in OpenAI's format, and their construction from choices. Pure."""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from msgspec import UNSET, Struct, UnsetType

from libs.dispatch.generation import Generation
from libs.model.tokenizer import Tokenizer
from services.gateway.request.choice import Choice, Piece, PromptShown, TokenLogprob
from services.gateway.request.tool_text import FORMAT
from services.gateway.request.unchecked import Unchecked


class PromptTokensDetails(Struct):
    """The number of the prompt's tokens whose KV was found cached."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """The number of the answers' tokens that are reasoning."""

    reasoning_tokens: int


class Usage(Struct):
    """The tokens of all prompts and all choices. Completion details are present if the model reasons."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Notes(Struct):
    """Notes on deviations from the request, an extension that is present only if there are any."""

    tools_as_text: str | UnsetType = UNSET
    """The format in which tools, calls and results were written into the prompt, because the chat template has none."""
    unchecked: list[Unchecked] | UnsetType = UNSET
    """The keywords that grammars could not enforce, and whether the answers satisfy them. A stream ends with them."""


class Details(Struct):
    """The workers and timings of the first choice. This extension is sent if the header x-fulcrum-details is 1."""

    prefill_worker: str
    decode_worker: str | None
    """The decode worker; None if the first token was the last one."""
    ttft_ms: float
    tpot_ms: float | None
    queue_ms: float


class ChatTopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionDelta(Struct, omit_defaults=True):
    """The part of a call that a chunk adds. Only the first carries the name."""

    name: str = ""
    arguments: str | None = None


class ToolCallDelta(Struct, omit_defaults=True):
    """A piece of a tool call. Only the first carries `id` and `type`."""

    index: int | None = None
    id: str = ""
    type: str = ""
    function: FunctionDelta | None = None


class Delta(Struct, omit_defaults=True):
    """The content that a chunk adds. `reasoning` repeats `reasoning_content` under the newer name."""

    role: str = ""
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class FunctionOut(Struct):
    """A called function. `arguments` is the text of a JSON object, as the model wrote it."""

    name: str
    arguments: str


class ToolCallOut(Struct):
    id: str
    function: FunctionOut
    type: str = "function"


class ChatMessageOut(Struct):
    """A whole answer. Reasoning and calls are present if the model wrote any; content is null if there are only
    calls.
    """

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallOut] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class PromptLogprob(Struct):
    """The logprob of a token at its position in a prompt, as vLLM shows it.

    `rank` 1 is the likeliest token. It is null for tokens beyond the requested alternatives.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry for each prompt token: logprobs by token id. The first token's entry is null."""


class CompletionLogprobs(Struct):
    """The logprobs of a choice or of a piece of one, as aligned lists. The first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


ChoiceT = TypeVar("ChoiceT")


class Envelope(Struct, Generic[ChoiceT]):
    """The fields around the choices of every answer and chunk."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    fulcrum: Details | UnsetType = UNSET
    x_fulcrum: Notes | UnsetType = UNSET


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Struct):
    """The body of every error response, on every route."""

    error: ErrorBody


class Declared(NamedTuple):
    """A route that is documented in the OpenAPI document although it bypasses FastAPI."""

    path: str
    summary: str
    request: Any
    reply: Any
    error: Any = ErrorReply
    streams: bool = True
    tag: str = "completions"


_AnswerT = TypeVar("_AnswerT", ChatChoice, ChatChunkChoice, CompletionChoice)


class Format(Protocol):
    """The construction of one route's answers from choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> ChatChunkChoice | CompletionChoice | None:
        """Return the chunk that begins a choice's stream, or None if its first text does."""
        ...

    def chunk(self, index: int, piece: Piece) -> ChatChunkChoice | CompletionChoice: ...

    def whole(self, index: int, piece: Piece) -> ChatChoice | CompletionChoice:
        """Return a complete choice for an answer that is not streamed."""
        ...


class ChatFormat:
    """The format of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index, Delta(role="assistant", content=""))

    def chunk(self, index: int, piece: Piece) -> ChatChunkChoice:
        """Return one chunk of a choice. The last chunk may have no text."""
        if piece.reasoning or piece.calls:
            return _with_ids(ChatChunkChoice(index, _delta(piece), self._shown(piece), _reason(piece)), piece)
        content = "".join(piece.text) if piece.text or not piece.finish else None
        chunk = ChatChunkChoice(index, Delta(content=content), self._shown(piece), _reason(piece))
        return chunk if piece.token_ids is None else _with_ids(chunk, piece)

    def whole(self, index: int, piece: Piece) -> ChatChoice:
        return _with_ids(ChatChoice(index, _message(piece), self._shown(piece), _reason(piece)), piece)

    def _shown(self, piece: Piece) -> ChatLogprobs | None:
        if not self._logprobs or not piece.logprobs:
            return None
        return ChatLogprobs([self.token(entry) for entry in piece.logprobs])

    def token(self, entry: TokenLogprob) -> ChatTokenLogprob:
        """Return a token's logprob and those of the requested number of most likely tokens.

        The token itself may not be among them.
        """
        assert entry.logprob is not None  # only a prompt's first token has none, and chats echo no prompt
        top = [ChatTopLogprob(*self._named(token_id, value)) for token_id, value in entry.logprob.top]
        return ChatTokenLogprob(*self._named(entry.token_id, entry.logprob.logprob), top)

    def _named(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = self._tokenizer.token_bytes(token_id)
        return raw.decode(errors="replace"), logprob, list(raw)


class CompletionFormat:
    """The format of /v1/completions. Chunks and whole answers have the same format."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, index: int) -> None:
        return

    def chunk(self, index: int, piece: Piece) -> CompletionChoice:
        chunk = CompletionChoice(index, "".join(piece.text), self._shown(piece), _reason(piece))
        return chunk if piece.token_ids is None else _with_ids(chunk, piece)

    whole = chunk

    def _shown(self, piece: Piece) -> CompletionLogprobs | None:
        if not self._logprobs or not piece.logprobs:
            return None
        return CompletionLogprobs(
            tokens=[self._name(entry.token_id) for entry in piece.logprobs],
            token_logprobs=[entry.logprob.logprob if entry.logprob else None for entry in piece.logprobs],
            top_logprobs=[self._top(entry) for entry in piece.logprobs],
            text_offset=[entry.text_offset for entry in piece.logprobs],
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float] | None:
        """Return the logprobs of the most likely tokens and the sampled one, which may be one more than requested."""
        if entry.logprob is None:
            return None
        top = {self._name(token_id): value for token_id, value in entry.logprob.top}
        top[self._name(entry.token_id)] = entry.logprob.logprob
        return top

    def _name(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


def _delta(piece: Piece) -> Delta:
    reasoning = "".join(piece.reasoning or ()) or None
    calls = [
        ToolCallDelta(
            call.index, call.id, "function" if call.id else "", FunctionDelta(call.name, "".join(call.arguments))
        )
        for call in piece.calls or ()
    ]
    return Delta("", "".join(piece.text) or None, reasoning, reasoning, calls or None)


def _message(piece: Piece) -> ChatMessageOut:
    message = ChatMessageOut("".join(piece.text))
    if piece.reasoning:
        message.reasoning_content = message.reasoning = "".join(piece.reasoning)
    if piece.calls:
        message.content = message.content or None
        message.tool_calls = [
            ToolCallOut(call.id, FunctionOut(call.name, "".join(call.arguments))) for call in piece.calls
        ]
    return message


def prompt_logprobs(shown: PromptShown) -> PromptLogprobs:
    """Return the prompt's logprobs in vLLM's format.

    Each entry contains the most likely tokens and the prompt's own.
    """

    def named(token_id: int, value: float, rank: int | None) -> PromptLogprob:
        return PromptLogprob(value, rank, shown.tokenizer.token_bytes(token_id).decode(errors="replace"))

    found: PromptLogprobs = [None]
    for token_id, logprob in zip(shown.token_ids[1:], shown.logprobs, strict=True):
        top = {str(other): named(other, value, rank) for rank, (other, value) in enumerate(logprob.top, 1)}
        top.setdefault(str(token_id), named(token_id, logprob.logprob, None))
        found.append(top)
    return found


def add_prompt(
    shown: PromptShown,
    answer: ChatChoice | ChatChunkChoice | CompletionChoice,
    envelope: Envelope[ChoiceT],
    *,
    scores: bool,
) -> None:
    """Add the requested parts of the prompt to an answer.

    They go into the choice of a text completion, which may have several prompts, and otherwise into the envelope.
    `scores` adds the logprobs of the prompt's tokens.
    """
    place = answer if isinstance(answer, CompletionChoice) else envelope
    if shown.ids:
        place.prompt_token_ids = list(shown.token_ids)
    if scores:
        place.prompt_logprobs = prompt_logprobs(shown)


def likeliest(choices: Sequence[Choice], n: int, best: int) -> list[Choice]:
    """Return the `best` of each prompt's `n` choices, in descending order of their tokens' mean logprob."""
    found: list[Choice] = []
    for start in range(0, len(choices), n):
        found += sorted(choices[start : start + n], key=_likelihood, reverse=True)[:best]
    return found


def _likelihood(choice: Choice) -> float:
    prompt = choice.text.prompt
    return prompt.mean_logprob if prompt is not None else 0.0


def _with_ids(answer: _AnswerT, piece: Piece) -> _AnswerT:
    """Add the piece's token ids if the client requested them."""
    if piece.token_ids is not None:
        answer.token_ids = piece.token_ids
    return answer


def _reason(piece: Piece) -> str | None:
    return piece.finish.value if piece.finish else None


def usage(choices: Sequence[Choice], n: int) -> Usage:
    """Return the usage of all choices.

    Each prompt is counted once. Its cached tokens are those of its first choice.
    """
    generations = [choice.generation for choice in choices]
    firsts = generations[::n]
    prompt_tokens = sum(generation.prompt_tokens for generation in firsts)
    completion_tokens = sum(_output_tokens(choice) for choice in choices)
    cached = PromptTokensDetails(sum(generation.cached_tokens for generation in firsts))
    reasoning = [choice.text.reasoning_tokens for choice in choices]
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached, _of_reasoning(reasoning))


def _output_tokens(choice: Choice) -> int:
    """Return the number of output tokens, which is 0 if the client requested only the prompt."""
    prompt = choice.text.prompt
    return 0 if prompt is not None and prompt.only else len(choice.generation.output)


def usage_so_far(choice: Choice) -> Usage:
    """Return the usage of one choice while it is streamed."""
    generation, reasoning = choice.generation, [choice.text.reasoning_tokens]
    prompt_tokens, completion_tokens = generation.prompt_tokens, _output_tokens(choice)
    cached = PromptTokensDetails(generation.cached_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached, _of_reasoning(reasoning))


def _of_reasoning(tokens: list[int | None]) -> CompletionTokensDetails | UnsetType:
    """Return the number of reasoning tokens, or UNSET if the model does not reason."""
    return UNSET if None in tokens else CompletionTokensDetails(sum(each or 0 for each in tokens))


def notes(*choices: Choice) -> Notes | UnsetType:
    """Return the notes on a complete answer, or UNSET if there are none."""
    found = end_notes(*choices)
    if choices[0].tools_as_text:
        found = found or Notes()
        found.tools_as_text = FORMAT
    return found


def end_notes(*choices: Choice) -> Notes | UnsetType:
    """Return the results of checking complete answers, or UNSET if nothing had to be checked."""
    found = [each for choice in choices if choice.text.record is not None for each in choice.text.record.found]
    return Notes(unchecked=found) if found else UNSET


def details(generation: Generation) -> Details:
    """Return the workers and timings of one choice."""
    timeline = generation.timeline
    later_tokens = len(generation.output) - 1
    return Details(
        prefill_worker=generation.placement.prefill_worker,
        decode_worker=generation.placement.decode_worker or None,
        ttft_ms=round(timeline.ttft_ns / 1e6, 3),
        tpot_ms=round(timeline.decode_ns / later_tokens / 1e6, 3) if later_tokens > 0 else None,
        queue_ms=round(timeline.queue_ns / 1e6, 3),
    )
