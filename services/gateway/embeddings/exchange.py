"""The routes that convert texts into vectors or scores: embeddings, score and rerank."""

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from libs.contracts.errors import InvalidRequest
from libs.model.info import Embedding
from services.gateway.embeddings.schema import (
    EMBEDDINGS_PATH,
    RERANK_PATHS,
    SCORE_PATHS,
    Document,
    EmbeddingItem,
    EmbeddingReply,
    EmbeddingRequest,
    PooledUsage,
    RerankItem,
    RerankReply,
    RerankRequest,
    ScoreItem,
    ScoreReply,
    ScoreRequest,
)
from services.gateway.request.choice import Choice, first_error
from services.gateway.request.endpoint import AnswerFactory, Reader
from services.gateway.request.exchange import OutputSignal, Wire
from services.gateway.request.harmless import drop_harmless
from services.gateway.request.intake import Arrival
from services.gateway.request.parse import ParsedRequest, pooled_request, prompts_of
from services.gateway.request.prompt import ServedModel
from services.gateway.request.schema import fit

Vectors = NDArray[np.float32]
"""Vectors as a 2D float32 array of shape [inputs, dimensions]."""


def shaped(packed: Sequence[bytes], embedding: Embedding, dimensions: int | None = None) -> Vectors:
    """Return the vectors after the model's post-processing: shortening, then normalisation. Pure."""
    vectors = np.stack([np.frombuffer(each, dtype="<f4") for each in packed])[:, :dimensions]
    return unit(vectors) if embedding.normalizes else vectors


def unit(vectors: Vectors) -> Vectors:
    """Return the vectors scaled to length 1. Zero vectors stay unchanged."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    found: Vectors = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return found


def cosines(first: Vectors, second: Vectors) -> list[float]:
    """Return the cosine similarity of each pair. A single vector in `first` is paired with every vector in `second`."""
    return [float(each) for each in (unit(first) * unit(second)).sum(axis=1)]


class Pooled(NamedTuple):
    """The parts of an answer that all of these routes have in common."""

    request_id: str
    created: int
    vectors: Vectors
    usage: PooledUsage
    embedding: Embedding

    def scores(self, first: int) -> list[float]:
        """Return the score of each pair.

        It is a cross-encoder's output, or the cosine of one of the `first` vectors and one of the others.
        """
        if self.embedding.pooling != "score":
            return cosines(self.vectors[:first], self.vectors[first:])
        outputs = self.vectors[:, 0].astype(np.float64)
        return [float(each) for each in (0.5 + 0.5 * np.tanh(outputs / 2) if self.embedding.sigmoid else outputs)]


Render = Callable[[Pooled], object]


class PooledExchange:
    """The exchange that sends an answer made from vectors."""

    def __init__(
        self,
        render: Render,
        dimensions: int | None,
        choices: list[Choice],
        model: ServedModel,
        arrival: Arrival,
        *,
        signal: OutputSignal,
        headers: Mapping[str, str],
    ) -> None:
        """Create the exchange.

        Raise InvalidRequest if the model does not support `dimensions`; None keeps the vectors' size.
        """
        self._embedding = model.info.embedding
        if fault := self._embedding.fault(dimensions):
            raise InvalidRequest(f"dimensions: {dimensions} for model {model.info.name!r}: {fault}", param="dimensions")
        self._render = render
        self._dimensions = dimensions
        self._choices = choices
        self._arrival = arrival
        self._signal = signal
        self._headers = headers

    async def whole(self, wire: Wire) -> None:
        """Send one JSON object once every vector is available."""
        await wire.json(200, await self.reply(), self._headers)

    async def reply(self) -> object:
        """Wait until every vector is available and return the answer. Raise the first error of a choice."""
        while not all(choice.text.done for choice in self._choices):
            await self._signal.wait()
            self._raise_error()
        self._raise_error()
        generations = [choice.generation for choice in self._choices]
        tokens = sum(each.prompt_tokens for each in generations)
        vectors = shaped([each.vector for each in generations], self._embedding, self._dimensions)
        arrival = self._arrival
        usage = PooledUsage(tokens, tokens)
        pooled = Pooled(arrival.request_id, arrival.arrival_ns // 10**9, vectors, usage, self._embedding)
        return self._render(pooled)

    async def stream(self, wire: Wire) -> None:
        """Send the same answer as `whole`, because these routes do not stream."""
        await self.whole(wire)

    def _raise_error(self) -> None:
        error = first_error(self._choices)
        if error is not None:
            raise error


class EmbeddingReader:
    async def read(self, body: bytes, _arrival: Arrival) -> tuple[ParsedRequest, AnswerFactory]:
        request = fit(body, EmbeddingRequest, partial(drop_harmless, served=frozenset(_FIELDS[EmbeddingRequest])))
        raw = request.add_special_tokens is False
        parsed = pooled_request(request.model, prompts_of(request.input, "input"), "input", raw=raw)
        render = partial(_embeddings, request.model, request.encoding_format == "base64")
        return parsed, partial(PooledExchange, render, request.dimensions)


class ScoreReader:
    async def read(self, body: bytes, _arrival: Arrival) -> tuple[ParsedRequest, AnswerFactory]:
        request = fit(body, ScoreRequest, _tidy_score)
        first, second = _texts(request.text_1), _texts(request.text_2)
        if not second:
            raise InvalidRequest("text_2 is empty", param="text_2")
        if len(first) != 1 and len(first) != len(second):
            text = f"text_1 has {len(first)} texts and text_2 {len(second)}: send one, or as many"
            raise InvalidRequest(text, param="text_1")
        pairs = tuple(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
        parsed = pooled_request(request.model, (*first, *second), "text_1 or text_2", pairs=pairs)
        return parsed, partial(PooledExchange, partial(_scores, request.model, len(first)), None)


class RerankReader:
    async def read(self, body: bytes, _arrival: Arrival) -> tuple[ParsedRequest, AnswerFactory]:
        request = fit(body, RerankRequest, partial(drop_harmless, served=frozenset(_FIELDS[RerankRequest])))
        documents = [each.text if isinstance(each, Document) else each for each in request.documents]
        if not documents:
            raise InvalidRequest("documents is empty", param="documents")
        pairs = tuple((request.query, document) for document in documents)
        parsed = pooled_request(request.model, (request.query, *documents), "query or documents", pairs=pairs)
        shown = None if request.return_documents is False else documents
        render = partial(_reranked, request.model, request.top_n or len(documents), shown)
        return parsed, partial(PooledExchange, render, None)


_FIELDS: Final = {kind: kind.__struct_fields__ for kind in (EmbeddingRequest, ScoreRequest, RerankRequest)}


def pooled_readers() -> dict[str, Reader]:
    """Return the reader of each path."""
    scores, reranks = dict.fromkeys(SCORE_PATHS, ScoreReader()), dict.fromkeys(RERANK_PATHS, RerankReader())
    return {EMBEDDINGS_PATH: EmbeddingReader(), **scores, **reranks}


_TEXT_NAMES: Final = {
    "queries": "text_1", "data_1": "text_1", "documents": "text_2", "items": "text_2", "data_2": "text_2",
}  # fmt: skip


def _tidy_score(body: dict[str, Any]) -> dict[str, Any]:
    """Rename vLLM's alternative field names and drop nulls. Raise InvalidRequest if two fields name the same texts."""
    named: dict[str, Any] = {}
    for key, value in drop_harmless(body, served=frozenset(_FIELDS[ScoreRequest]) | _TEXT_NAMES.keys()).items():
        name = _TEXT_NAMES.get(key, key)
        if value is None and name in ("text_1", "text_2"):
            continue
        if name in named:
            raise InvalidRequest(f"{key} and another field name the same texts: send one", param=key)
        named[name] = value
    return named


def _texts(texts: str | list[str]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts)


def _embeddings(model: str, in_base64: bool, pooled: Pooled) -> EmbeddingReply:
    shown = [
        base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector.tolist()
        for vector in pooled.vectors
    ]
    return EmbeddingReply(model, [EmbeddingItem(index, each) for index, each in enumerate(shown)], pooled.usage)


def _scores(model: str, first: int, pooled: Pooled) -> ScoreReply:
    scores = pooled.scores(first)
    items = [ScoreItem(index, score) for index, score in enumerate(scores)]
    return ScoreReply(f"score-{pooled.request_id}", pooled.created, model, items, pooled.usage)


def _reranked(model: str, most: int, documents: list[str] | None, pooled: Pooled) -> RerankReply:
    scores = pooled.scores(1)
    results = [RerankItem(index, score) for index, score in enumerate(scores)]
    results.sort(key=lambda item: -item.relevance_score)
    for item in results[:most] if documents is not None else ():
        item.document = Document((documents or [])[item.index])
    return RerankReply(f"rerank-{pooled.request_id}", model, results[:most], pooled.usage)
