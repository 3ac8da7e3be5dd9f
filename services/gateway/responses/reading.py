"""Reads `POST /v1/responses` as a chat and renders its answer as a response."""

import secrets
from collections.abc import Mapping
from functools import partial

from services.gateway.dispatch.choice import Choice
from services.gateway.dispatch.intake import Arrival
from services.gateway.http.endpoint import Answer
from services.gateway.http.exchange import News
from services.gateway.http.formats import ChatFormat
from services.gateway.prompt.catalog import ServedModel
from services.gateway.prompt.parse import Asked
from services.gateway.responses.exchange import ResponseExchange
from services.gateway.responses.keeping import KeptResponses
from services.gateway.responses.output import ResponseOutput
from services.gateway.responses.replies import Response
from services.gateway.responses.request import Items, parse_response, response_asked

ID_BYTES = 24


class ResponseReader:
    """The endpoint's Reader for responses."""

    def __init__(self, kept: KeptResponses) -> None:
        self._kept = kept

    async def read(self, body: bytes, arrival: Arrival) -> tuple[Asked, Answer]:
        # Waits for the earlier response that this one continues.
        request = parse_response(body)
        previous = request.previous_response_id
        earlier = await self._kept.items(arrival.headers.tenant, previous) if previous else []
        # An id of ours, whatever the client's request is called: by its id a response is got again.
        found = response_asked(request, earlier, _new_id("resp_"), arrival.arrival_ns // 1_000_000_000)
        return found.asked, partial(
            self._answer,
            found.shown,
            items=found.items if found.store else None,
            logprobs=found.asked.sampling.logprobs,
        )

    def _answer(
        self,
        shown: Response,
        choices: list[Choice],
        model: ServedModel,
        arrival: Arrival,
        *,
        items: Items | None,
        logprobs: bool,
        news: News,
        headers: Mapping[str, str],
    ) -> ResponseExchange:
        named = ChatFormat(model.tokenizer, logprobs=True).token if logprobs else None
        keep = None if items is None else partial(self._kept.keep, arrival.headers.tenant, items)
        output = ResponseOutput(_new_id, named)
        return ResponseExchange(choices[0], shown, output, news, keep=keep, headers=headers)


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(ID_BYTES)
