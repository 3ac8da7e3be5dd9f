"""Test that any bytes as a body are a request or a refusal that names a field."""

import json
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.errors import InvalidRequest
from services.gateway.request.parse import ParsedRequest, parse_chat, parse_completion
from services.gateway.request.schema import ChatRequest, CompletionRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "tools", "echo", "any", ""})

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=4)
ends = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255))


def _refusal(parse: Callable[[bytes], ParsedRequest], body: bytes) -> InvalidRequest | None:
    try:
        parse(body)
    except InvalidRequest as error:
        return error
    return None


@given(change=bodies, spoiled=st.none() | ends)
def test_a_body_is_accepted_or_refused_by_field(change: dict[str, object], spoiled: tuple[float, int] | None) -> None:
    for parse, whole in ((parse_chat, CHAT), (parse_completion, TEXT)):
        body = bytearray(json.dumps({**whole, **change}, ensure_ascii=False).encode(errors="surrogatepass"))
        if spoiled is not None:
            body[int(spoiled[0] * len(body))] = spoiled[1]
        refusal = _refusal(parse, bytes(body))
        assert refusal is None or refusal.param
