"""From pieces of choices to the objects of either route. Pure."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from msgspec import UNSET, UnsetType

from libs.dispatch.generation import Generation
from libs.model.tokenizer import Tokenizer
from services.gateway.dispatch.choice import Choice, Piece, TokenLogprob
from services.gateway.dispatch.prompt_shown import PromptShown
from services.gateway.http.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessageOut,
    ChatTokenLogprob,
    ChatTopLogprob,
    ChoiceT,
    CompletionChoice,
    CompletionLogprobs,
    CompletionTokensDetails,
    Delta,
    Details,
    Envelope,
    FunctionDelta,
    FunctionOut,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    ToolCallDelta,
    ToolCallOut,
    Usage,
)

_AnswerT = TypeVar("_AnswerT", ChatChoice, ChatChunkChoice, CompletionChoice)


class Format(Protocol):
    """How a route shows choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> ChatChunkChoice | CompletionChoice | None:
        """What a choice's stream starts with, if anything."""
        ...

    def chunk(self, index: int, piece: Piece) -> ChatChunkChoice | CompletionChoice:
        """A piece in a stream."""
        ...

    def whole(self, index: int, piece: Piece) -> ChatChoice | CompletionChoice:
        """All of a choice."""
        ...


class ChatFormat:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, index: int) -> ChatChunkChoice:
        """The role, with no text yet."""
        return ChatChunkChoice(index, Delta(role="assistant", content=""))

    def chunk(self, index: int, piece: Piece) -> ChatChunkChoice:
        """A piece; the last one may have no text."""
        if piece.reasoning or piece.calls:
            return _with_ids(ChatChunkChoice(index, _delta(piece), self._shown(piece), _reason(piece)), piece)
        content = "".join(piece.text) if piece.text or not piece.finish else None
        chunk = ChatChunkChoice(index, Delta(content=content), self._shown(piece), _reason(piece))
        return chunk if piece.token_ids is None else _with_ids(chunk, piece)

    def whole(self, index: int, piece: Piece) -> ChatChoice:
        """All of a choice."""
        return _with_ids(ChatChoice(index, _message(piece), self._shown(piece), _reason(piece)), piece)

    def _shown(self, piece: Piece) -> ChatLogprobs | None:
        if not self._logprobs or not piece.logprobs:
            return None
        return ChatLogprobs([self.token(entry) for entry in piece.logprobs])

    def token(self, entry: TokenLogprob) -> ChatTokenLogprob:
        """With as many of the most likely tokens as were asked for; the sampled one need not be among them."""
        assert entry.logprob is not None  # a prompt's first token alone has none, and chats echo no prompt
        top = [ChatTopLogprob(*self._named(token_id, value)) for token_id, value in entry.logprob.top]
        return ChatTokenLogprob(*self._named(entry.token_id, entry.logprob.logprob), top)

    def _named(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        raw = self._tokenizer.token_bytes(token_id)
        return raw.decode(errors="replace"), logprob, list(raw)


class CompletionFormat:
    """/v1/completions."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, index: int) -> None:
        """Nothing: the first text does."""
        return

    def chunk(self, index: int, piece: Piece) -> CompletionChoice:
        """A piece, or all of a choice."""
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
        """The most likely tokens, and always the sampled one, which may come on top of as many as were asked for."""
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
    """As vLLM shows them: the most likely tokens, and always the prompt's own."""

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
    """What is asked of the prompt: beside a text completion's choice, of which there may be several prompts; a chat has
    one. `scores`: its logprobs by position."""
    place = answer if isinstance(answer, CompletionChoice) else envelope
    if shown.ids:
        place.prompt_token_ids = list(shown.token_ids)
    if scores:
        place.prompt_logprobs = prompt_logprobs(shown)


def likeliest(choices: Sequence[Choice], n: int, best: int) -> list[Choice]:
    """The `best` of each prompt's `n` choices, by the mean logprob of their tokens."""
    found: list[Choice] = []
    for start in range(0, len(choices), n):
        found += sorted(choices[start : start + n], key=_likelihood, reverse=True)[:best]
    return found


def _likelihood(choice: Choice) -> float:
    prompt = choice.text.prompt
    return prompt.mean_logprob if prompt is not None else 0.0


def _with_ids(answer: _AnswerT, piece: Piece) -> _AnswerT:
    """With its tokens by id, where they are wanted."""
    if piece.token_ids is not None:
        answer.token_ids = piece.token_ids
    return answer


def _reason(piece: Piece) -> str | None:
    return piece.finish.value if piece.finish else None


def usage(choices: Sequence[Choice], n: int) -> Usage:
    """Each prompt counts once, whatever its `n`; a prompt's cached tokens are its first choice's."""
    generations = [choice.generation for choice in choices]
    firsts = generations[::n]
    prompt_tokens = sum(generation.prompt_tokens for generation in firsts)
    completion_tokens = sum(_output_tokens(choice) for choice in choices)
    cached = PromptTokensDetails(sum(generation.cached_tokens for generation in firsts))
    reasoning = [choice.text.reasoning_tokens for choice in choices]
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached, _of_reasoning(reasoning))


def _output_tokens(choice: Choice) -> int:
    """None where the prompt alone is asked for."""
    prompt = choice.text.prompt
    return 0 if prompt is not None and prompt.only else len(choice.generation.output)


def usage_so_far(choice: Choice) -> Usage:
    """Usage of one choice while it is streamed."""
    generation, reasoning = choice.generation, [choice.text.reasoning_tokens]
    prompt_tokens, completion_tokens = generation.prompt_tokens, _output_tokens(choice)
    cached = PromptTokensDetails(generation.cached_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached, _of_reasoning(reasoning))


def _of_reasoning(tokens: list[int | None]) -> CompletionTokensDetails | UnsetType:
    """Nothing for a model that writes none."""
    return UNSET if None in tokens else CompletionTokensDetails(sum(each or 0 for each in tokens))


def details(generation: Generation) -> Details:
    """Who served a choice and how fast."""
    timeline = generation.timeline
    later_tokens = len(generation.output) - 1
    return Details(
        prefill_worker=generation.placement.prefill_worker,
        decode_worker=generation.placement.decode_worker or None,
        ttft_ms=round(timeline.ttft_ns / 1e6, 3),
        tpot_ms=round(timeline.decode_ns / later_tokens / 1e6, 3) if later_tokens > 0 else None,
        queue_ms=round(timeline.queue_ns / 1e6, 3),
    )
