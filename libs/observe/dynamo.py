"""The messages and files of Dynamo's workers: forward-pass metrics, channels and model cards. Pure."""

from contextlib import suppress
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec

from libs.contracts.errors import InvalidRequest
from libs.observe.fleet import MAX_NAME_CHARS

TOPIC: Final = "forward-pass-metrics"
VERSION: Final = 1
ENVELOPE_VERSION: Final = 1
_HEADER_BYTES: Final = 5
MAX_STEP_S: Final = 600.0
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9._-]+$")]


class Scheduled(msgspec.Struct, frozen=True):
    """The requests of one step."""

    num_prefill_requests: Count = 0
    sum_prefill_tokens: Count = 0
    sum_prefill_kv_tokens: Count = 0
    num_decode_requests: Count = 0
    sum_decode_kv_tokens: Count = 0


class QueuedRequests(msgspec.Struct, frozen=True):
    """The requests that wait."""

    num_prefill_requests: Count = 0
    sum_prefill_tokens: Count = 0
    num_decode_requests: Count = 0


class PassRecord(msgspec.Struct, frozen=True):
    """One step of an engine, or a heartbeat of an idle one, whose wall time is 0."""

    version: int
    worker_id: Name
    dp_rank: Annotated[int, msgspec.Meta(ge=0, lt=4096)]
    counter_id: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    wall_time: Annotated[float, msgspec.Meta(ge=0, le=MAX_STEP_S)]
    scheduled_requests: Scheduled = Scheduled()
    queued_requests: QueuedRequests = QueuedRequests()


class PublishedRecord(msgspec.Struct, frozen=True):
    """A record in its published form."""

    publisher_id: int
    sequence: int
    published_at: Annotated[int, msgspec.Meta(ge=0, lt=2**43)]
    """Unix milliseconds of the publisher's clock."""
    topic: Literal["forward-pass-metrics"]
    payload: bytes


class _Endpoint(msgspec.Struct, frozen=True):
    namespace: Name
    component: Name


class _Scope(msgspec.Struct, frozen=True):
    endpoint: _Endpoint


class _Config(msgspec.Struct, frozen=True):
    endpoint: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]


class _Transport(msgspec.Struct, frozen=True):
    kind: str
    config: _Config


class Channel(msgspec.Struct, frozen=True):
    """One publisher of records."""

    instance_id: int
    """The `publisher_id` of the publisher's messages."""
    topic: str
    scope: _Scope
    transport: _Transport

    @property
    def endpoint(self) -> str:
        return self.transport.config.endpoint

    @property
    def node(self) -> str:
        """The host of the channel's endpoint; empty if that is not an address like tcp://host:port."""
        with suppress(ValueError):
            parts = urlsplit(self.endpoint)
            if parts.scheme == "tcp" and parts.hostname and parts.port and self.endpoint.isprintable():
                return parts.hostname
        return ""


class _Runtime(msgspec.Struct, frozen=True):
    total_kv_blocks: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    data_parallel_size: Count = 1


class _Model(msgspec.Struct, frozen=True):
    display_name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    worker_type: str | None = None
    kv_cache_block_size: Count = 0
    runtime_config: _Runtime = _Runtime()


class Card(msgspec.Struct, frozen=True):
    """The description of a worker by itself."""

    component: Name
    instance_id: int
    card_json: _Model

    @property
    def role(self) -> str:
        """The worker's role: prefill, decode or mixed."""
        found = (self.card_json.worker_type or "").lower()
        return found if found in ("prefill", "decode") else "mixed"

    @property
    def name(self) -> str:
        return f"{self.component}-{self.instance_id:x}"


_ENVELOPES: Final = msgspec.msgpack.Decoder(PublishedRecord)
_RECORDS: Final = msgspec.msgpack.Decoder(PassRecord)
_CHANNELS: Final = msgspec.json.Decoder(Channel)
_CARDS: Final = msgspec.json.Decoder(Card)


def parse_message(parts: list[bytes]) -> tuple[PublishedRecord, PassRecord]:
    """Return the record in a message of topic, publisher, sequence and envelope. Raise InvalidRequest."""
    if not parts or len(parts[-1]) < _HEADER_BYTES:
        raise InvalidRequest("a message without an envelope")
    found = parts[-1]
    version, length = found[0], int.from_bytes(found[1:_HEADER_BYTES], "big")
    if version != ENVELOPE_VERSION:
        raise InvalidRequest(f"envelopes have version {version}, not {ENVELOPE_VERSION}")
    if length != len(found) - _HEADER_BYTES:
        raise InvalidRequest("an envelope of another length than it says")
    try:
        envelope = _ENVELOPES.decode(found[_HEADER_BYTES:])
        record = _RECORDS.decode(envelope.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"no forward-pass metrics: {error}") from None
    if record.version != VERSION:
        raise InvalidRequest(f"forward-pass metrics have version {record.version}, not {VERSION}")
    return envelope, record


def parse_channel(text: bytes) -> Channel | None:
    """Return a channel of forward-pass metrics over ZeroMQ and TCP; None for any other text."""
    try:
        found = _CHANNELS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if found.topic == TOPIC and found.transport.kind == "Zmq" and found.node else None


def parse_card(text: bytes) -> Card | None:
    try:
        return _CARDS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
