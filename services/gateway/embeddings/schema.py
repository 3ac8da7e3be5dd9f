"""The bodies of the embedding routes: OpenAI's embeddings, vLLM's score and Jina's rerank. Pure."""

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from services.gateway.request.formats import Declared
from services.gateway.request.schema import AtLeastOne, Label

EMBEDDINGS_PATH: Final = "/v1/embeddings"
SCORE_PATH: Final = "/v1/score"
RERANK_PATH: Final = "/v1/rerank"
SCORE_PATHS: Final = (SCORE_PATH, "/score")
RERANK_PATHS: Final = (RERANK_PATH, "/rerank", "/v2/rerank")
"""The paths of score and rerank, including vLLM's alternatives. Cohere's client uses `/v2/rerank`."""
MAX_INPUTS: Final = 2048
"""The maximum number of inputs in OpenAI's API. A gateway with a shorter queue accepts fewer."""


class EmbeddingRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/embeddings.

    `input` is text, token ids, or a list of either. `add_special_tokens` is vLLM's. `user` has no effect.
    """

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: AtLeastOne | None = None
    add_special_tokens: bool | None = None
    user: Label | None = None


class ScoreRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/score: one text against each of several, or two lists of one length pair by pair.

    `queries` with `documents` or `items` are vLLM's other names of the texts.
    """

    model: str
    text_1: str | list[str]
    text_2: str | list[str]
    user: Label | None = None


class Document(Struct, forbid_unknown_fields=True):
    text: str


class RerankRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/rerank. `top_n` 0 or null returns all documents."""

    model: str
    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    user: Label | None = None


class PooledUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(Struct):
    index: int
    embedding: list[float] | str
    """The vector, either as numbers or as little-endian float32 in base64."""
    object: str = "embedding"


class EmbeddingReply(Struct):
    model: str
    data: list[EmbeddingItem]
    usage: PooledUsage
    object: str = "list"


class ScoreItem(Struct):
    index: int
    score: float
    object: str = "score"


class ScoreReply(Struct):
    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: PooledUsage
    object: str = "list"


class RerankItem(Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankReply(Struct):
    id: str
    model: str
    results: list[RerankItem]
    usage: PooledUsage


POOLED_ROUTES: Final = tuple(
    Declared(path, summary, request, reply, streams=False, tag="embeddings")
    for path, summary, request, reply in (
        (EMBEDDINGS_PATH, "Turn texts into vectors.", EmbeddingRequest, EmbeddingReply),
        *((path, "Compare texts by their vectors.", ScoreRequest, ScoreReply) for path in SCORE_PATHS),
        *((path, "Order documents by a query.", RerankRequest, RerankReply) for path in RERANK_PATHS),
    )
)
