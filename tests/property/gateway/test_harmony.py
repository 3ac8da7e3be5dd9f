"""Properties of gpt-oss's channels: content is that of channel final, however its tokens arrive."""

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from libs.dispatch.generation import ApiFinishReason
from libs.engine.reports import Logprob
from libs.testing.engines.harmony import MARKERS, sim_with_markers
from services.gateway.answers.families import HarmonyParser
from services.gateway.answers.parts import AnswerReader
from services.gateway.request.choice import ChoiceText, PartReaders, Piece

TOKENIZER = sim_with_markers()
IDS = {text: TOKENIZER.encode(text, add_special_tokens=False)[0] for text in MARKERS}
ENDS = frozenset({IDS["<|return|>"], IDS["<|call|>"]})


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class Message:
    header: str
    body: str
    end: str
    shown: bool

    @property
    def text(self) -> str:
        return f"{self.header}<|message|>{self.body}{self.end}"


bodies = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=12)
REASONS = ("<|channel|>analysis", "<|channel|>commentary")
CALLS = ("<|channel|>commentary to=functions.f <|constrain|>json", " to=functions.f<|channel|>commentary json")
headers = st.sampled_from(
    [
        ("<|channel|>final", True),
        ("<|channel|>final <|constrain|>json", True),
        ("", True),
        ("<|channel|>analysis", False),
        ("<|channel|>commentary", False),
        ("<|channel|>commentary to=functions.f <|constrain|>json", False),
        (" to=functions.f<|channel|>commentary json", False),
        ("<|channel|>final to=functions.f", False),
        ("<|channel|>finally", False),
        ("<|channel|>" + "final " * 100, False),
    ]
)
messages = st.builds(
    lambda header, body, end: Message(header[0], body, end, header[1]),
    headers, bodies, st.sampled_from(["<|end|>", "<|return|>", "<|call|>"]),
)  # fmt: skip
strangers = st.builds(lambda body: Message("user", body, "<|end|>", shown=False), bodies)


def answer(said: list[Message]) -> str:
    """Draw an answer after `<|start|>assistant`; a stranger is a turn of another role."""
    return "<|start|>".join(
        message.text if not place or message.header == "user" else "assistant" + message.text
        for place, message in enumerate(said)
    )


def decoded(
    tokens: list[int], cuts: frozenset[int] = frozenset(), stops: tuple[str, ...] = (), calls: bool = False
) -> Piece:
    """Return all pieces as one; they are read after the tokens at `cuts`."""
    decoder = TOKENIZER.decoder()
    reader = AnswerReader(HarmonyParser(calls=calls), decoder, TOKENIZER.special_tokens)
    choice = ChoiceText(
        request_id="r", decoder=decoder, stops=stops, silent_token_ids=ENDS, in_pieces=True,
        parts=PartReaders(reader, reasons=True, new_call_id=lambda _name, _place: "id", max_calls=9),
        changed=lambda: None,
    )  # fmt: skip
    whole = Piece(reasoning=[], calls=[])
    assert whole.reasoning is not None and whole.calls is not None

    def take() -> None:
        piece = choice.take()
        whole.text += piece.text
        whole.logprobs += piece.logprobs
        whole.reasoning += piece.reasoning or ()
        for call in piece.calls or ():
            if call.id:
                whole.calls.append(call)
            else:
                whole.calls[-1].arguments += call.arguments
        whole.finish = piece.finish

    reason = ApiFinishReason.LENGTH
    for place, token in enumerate(tokens):
        if choice.token(token, Logprob(-float(place))):
            reason = ApiFinishReason.STOP
            break
        if place in cuts:
            take()
    choice.finish(reason)
    take()
    return whole


def text_of(piece: Piece) -> str:
    return "".join(piece.text)


cuts = st.frozensets(st.integers(0, 200))


@given(first=messages, others=st.lists(messages | strangers, max_size=3), at=cuts)
def test_content_is_that_of_final_messages_in_any_pieces(
    first: Message, others: list[Message], at: frozenset[int]
) -> None:
    said = [first, *others]
    tokens = encode(answer(said))
    piece = decoded(tokens, at)
    expected = "".join(message.body for message in said if message.shown)
    assert text_of(piece) == expected
    assert bytes(entry.token_id for entry in piece.logprobs) == expected.encode()
    assert not piece.calls, "none may be called"


@given(first=messages, others=st.lists(messages | strangers, max_size=3), at=cuts)
def test_reasoning_and_calls_are_separated(first: Message, others: list[Message], at: frozenset[int]) -> None:
    said = [first, *others]
    piece = decoded(encode(answer(said)), at, calls=True)
    thoughts = [message.body for message in said if message.header in REASONS]
    called = [message.body or "{}" for message in said if message.header in (*CALLS, "<|channel|>final to=functions.f")]
    assert "".join(piece.reasoning) == "".join(thoughts)
    assert [(call.name, "".join(call.arguments)) for call in piece.calls] == [("f", body) for body in called]
    assert text_of(piece) == "".join(message.body for message in said if message.shown)
    calls_tools = bool(called) and piece.finish is ApiFinishReason.TOOL_CALLS
    assert calls_tools or not called or piece.finish is ApiFinishReason.LENGTH


@given(body=bodies, at=cuts)
@example(body=" to be or not", at=frozenset({0, 1, 2}))
@example(body=" t", at=frozenset({0}))
@example(body=" to", at=frozenset())
def test_an_answer_without_any_marker_is_content(body: str, at: frozenset[int]) -> None:
    assert text_of(decoded(encode(body), at)) == (body if not body.startswith(" to=") else "")


@given(body=bodies, at=cuts)
def test_an_answer_that_ends_in_its_reasoning_has_no_content(body: str, at: frozenset[int]) -> None:
    piece = decoded(encode(f"<|channel|>analysis<|message|>{body}"), at)
    assert (text_of(piece), piece.logprobs, piece.finish) == ("", [], ApiFinishReason.LENGTH)


any_tokens = st.lists(st.sampled_from([*IDS.values(), *encode("assistant final analysis to=")]), max_size=60)


@given(tokens=any_tokens, at=cuts)
def test_no_marker_is_ever_content_and_cuts_change_nothing(tokens: list[int], at: frozenset[int]) -> None:
    whole, pieces = decoded(tokens), decoded(tokens, at)
    assert text_of(whole) == text_of(pieces)
    assert [entry.token_id for entry in whole.logprobs] == [entry.token_id for entry in pieces.logprobs]
    assert not {entry.token_id for entry in whole.logprobs} & set(IDS.values())
    assert "<|" not in text_of(whole)


@given(tokens=any_tokens)
def test_few_tokens_are_held_back(tokens: list[int]) -> None:
    parser = HarmonyParser(calls=True)
    reader, held = AnswerReader(parser, TOKENIZER.decoder(), TOKENIZER.special_tokens), 0
    for token in tokens:
        reader.token(token)
        held = held + 1 if parser.held else 0
        assert held < len(" to=")


def test_stop_strings_end_only_visible_text() -> None:
    tokens = encode("<|channel|>analysis<|message|>a STOP<|end|><|start|>assistant<|channel|>final<|message|>b STOP c")
    piece = decoded(tokens, stops=("STOP", "final"))
    assert (text_of(piece), piece.finish) == ("b ", ApiFinishReason.STOP)
