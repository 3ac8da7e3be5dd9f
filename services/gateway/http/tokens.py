"""`/tokenize` and `/detokenize` in vLLM's shapes, for prompts and chats."""

import uuid
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send

from libs.contracts.errors import FulcrumError, InvalidRequest
from libs.keys.gate import caller_of
from libs.runtime.http.semantics import check_json
from services.gateway.dispatch.intake import Intake
from services.gateway.http.exchange import Wire, error_reply
from services.gateway.http.stalls import ClientGone, Stalled, Stalls, read_body
from services.gateway.prompt.catalog import Catalog
from services.gateway.prompt.headers import read_headers
from services.gateway.prompt.parse import parse_detokenize, parse_tokenize


class Tokenized(Struct):
    """The tokens of a text or a chat. `token_strs` is null unless requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct):
    """The text of tokens, without special ones."""

    prompt: str


class TokenRoutes:
    """The handlers of both routes. `allowed` holds the models that the caller may use; empty allows all."""

    def __init__(self, intake: Intake, catalog: Catalog) -> None:
        self._intake = intake
        self._catalog = catalog

    async def tokenize(self, body: bytes, allowed: AbstractSet[str], tenant: str) -> Tokenized:
        asked, shows = parse_tokenize(body)
        model = self._catalog.need(asked.model, allowed)
        (tokens,) = await self._intake.tokens(asked, model, tenant)
        strings = [model.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens] if shows else None
        return Tokenized(len(tokens), model.info.max_context_tokens, tokens, strings)

    async def detokenize(self, body: bytes, allowed: AbstractSet[str], _tenant: str) -> Detokenized:
        asked = parse_detokenize(body)
        model = self._catalog.need(asked.model, allowed)
        if any(token >= model.info.vocab_size for token in asked.tokens):
            text = f"tokens: one is beyond the vocabulary's {model.info.vocab_size}"
            raise InvalidRequest(text, param="tokens")
        return Detokenized(model.tokenizer.decode(asked.tokens))


class TokenEndpoint:
    """One of the two routes as an ASGI callable, within the bounds on all bodies."""

    def __init__(
        self, answer: Callable[[bytes, AbstractSet[str], str], Awaitable[Any]], stalls: Stalls, max_body_bytes: int
    ) -> None:
        self._answer = answer
        self._stalls = stalls
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, using OpenAI's error shape if it fails."""
        request_id = uuid.uuid4().hex
        with suppress(ClientGone, Stalled):
            try:
                raw = dict(scope["headers"])
                caller = caller_of(scope)
                headers = read_headers(raw, caller)
                request_id = headers.request_id or request_id
                check_json(raw)
                self._stalls.check_room(headers.tenant)
                with self._stalls.watched(headers.tenant) as patience:
                    body = await read_body(receive, raw, self._max_body_bytes, patience, self._stalls)
                    found = await self._answer(body, caller.models, headers.tenant)
                    await Wire(send, patience).json(200, found, {"x-request-id": request_id})
            except FulcrumError as error:
                with self._stalls.watched() as patience:
                    own = {"x-request-id": request_id, **error.http_headers}
                    await Wire(send, patience).json(error.http_status, error_reply(error), own)


def token_routes(intake: Intake, catalog: Catalog, stalls: Stalls, max_body_bytes: int) -> dict[str, ASGIApp]:
    tokens = TokenRoutes(intake, catalog)
    return {
        "/tokenize": TokenEndpoint(tokens.tokenize, stalls, max_body_bytes),
        "/detokenize": TokenEndpoint(tokens.detokenize, stalls, max_body_bytes),
    }
