"""The catalogue's wire types: models that a cluster can serve, with reports of gateways and planner about them."""

from typing import Annotated, Final

from msgspec import Meta, Struct

MAX_NAME_CHARS: Final = 200
MAX_RESERVATIONS: Final = 16
MAX_MODELS: Final = 2_000
DAY_MINUTES: Final = 1_440

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Minute = Annotated[int, Meta(ge=0, lt=DAY_MINUTES)]
Milliseconds = Annotated[float, Meta(gt=0, le=86_400_000)]


class Reservation(Struct, frozen=True):
    """GPUs reserved for a model during a period of each day, in UTC."""

    gpus: Annotated[int, Meta(ge=1, le=65_536)]
    from_minute: Minute
    to_minute: Minute
    """The exclusive end. Equal to `from_minute` it means all day; a lower value means past midnight."""


class ModelEntry(Struct, frozen=True, omit_defaults=True):
    """A model, by the name that requests use."""

    name: Name
    source: str
    """A folder in the layout of Hugging Face, or of PEFT for an adapter, or builtin:sim."""
    size_bytes: Annotated[int, Meta(ge=0, le=2**53)]
    floor: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """The least number of workers for the model, as far as there are any."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Models of a higher priority are loaded first and give way last."""
    ttft_ms: Milliseconds | None = None
    """The TTFT target of requests that have none; None for the gateway's default."""
    tpot_ms: Milliseconds | None = None
    pinned: bool = False
    """Whether the model stays once it has been loaded, or is required by floor or reservation."""
    reservations: Annotated[tuple[Reservation, ...], Meta(max_length=MAX_RESERVATIONS)] = ()
    parent: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] = ""
    """For a LoRA adapter, the model on whose workers it is loaded; empty for a model of its own."""


class LoadTimes(Struct, frozen=True, omit_defaults=True):
    """Seconds that loading the model took most recently; 0 if never measured."""

    load_s: float = 0.0
    """Time to load the weights from their source."""
    wake_s: float = 0.0
    """Time to load the weights from host memory."""


class ModelUse(Struct, frozen=True, omit_defaults=True):
    """One gateway's use of a model, as it reports it."""

    arrivals: int = 0
    """The number of requests since the gateway started."""
    last_unix_ms: int = 0
    """The arrival of the latest request; 0 before the first."""
    waiting: int = 0
    """The number of requests that no worker has yet."""
    waiting_since_unix_ms: int = 0
    in_flight: int = 0
    """The number of requests that have not ended, including waiting ones."""
    promised_unix_ms: int = 0
    """The time at which a client was asked to retry, when the model should be loaded; 0 if none was."""
    lines_waiting: int = 0
    """The number of `waiting` requests that are lines of batch jobs."""
    lines_in_flight: int = 0
    """The number of `in_flight` requests that are lines of batch jobs."""


class ModelOutlook(Struct, frozen=True, omit_defaults=True):
    """The planner's expectations about a model, published for gateways."""

    state: str
    """One of serving, loading, asleep, host (in a worker's host memory), disk, failed."""
    wait_s: float = 0.0
    """The expected wait for the model of a request that arrives now."""
    ready_unix_ms: int = 0
    """When a load in progress is expected to end."""
    error: str = ""
    """The reason why the last load failed, as long as it is not retried."""
