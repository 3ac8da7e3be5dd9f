"""What a cluster keeps of each model that it can serve, and what gateways and the planner say of it. Wire types."""

from typing import Annotated, Final

from msgspec import Meta, Struct

MAX_NAME_CHARS: Final = 200
MAX_RESERVATIONS: Final = 16
MAX_MODELS: Final = 2_000
"""In one catalogue."""
DAY_MINUTES: Final = 1_440

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Minute = Annotated[int, Meta(ge=0, lt=DAY_MINUTES)]
Milliseconds = Annotated[float, Meta(gt=0, le=86_400_000)]


class Reservation(Struct, frozen=True):
    """GPUs that are kept for a model at a time of the day, UTC."""

    gpus: Annotated[int, Meta(ge=1, le=65_536)]
    from_minute: Minute
    to_minute: Minute
    """Not included; equal to `from_minute`: all day, less: past midnight."""


class ModelEntry(Struct, frozen=True, omit_defaults=True):
    """A model by the name that requests use."""

    name: Name
    source: str
    """Folder in Hugging Face's layout, or PEFT's for an adapter, or builtin:sim."""
    size_bytes: Annotated[int, Meta(ge=0, le=2**53)]
    """Of its weights."""
    floor: Annotated[int, Meta(ge=0, le=65_536)] = 0
    """Workers that it never has less of, as far as there are any."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Higher ones are loaded first, and lose their turn last."""
    ttft_ms: Milliseconds | None = None
    """Wanted where a request names none; None: as the gateway has it."""
    tpot_ms: Milliseconds | None = None
    pinned: bool = False
    """Once loaded, or asked for by floor or reservation, it stays."""
    reservations: Annotated[tuple[Reservation, ...], Meta(max_length=MAX_RESERVATIONS)] = ()
    parent: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] = ""
    """Of a LoRA adapter: the model that it belongs to, on whose workers it is loaded; empty: a model of its own."""


class LoadTimes(Struct, frozen=True, omit_defaults=True):
    """Seconds that bringing a model up took when it was last done; 0: never measured."""

    load_s: float = 0.0
    """From its source."""
    wake_s: float = 0.0
    """From host memory."""


class ModelUse(Struct, frozen=True, omit_defaults=True):
    """What one gateway has of a model."""

    arrivals: int = 0
    """Requests since the gateway started."""
    last_unix_ms: int = 0
    """Arrival of the last one; 0: none came yet."""
    waiting: int = 0
    """Of those that have not ended: no worker has them yet."""
    waiting_since_unix_ms: int = 0
    in_flight: int = 0
    """All that have not ended, waiting ones included."""
    promised_unix_ms: int = 0
    """When a client was asked to come back, by which time the model is to be there; 0: none was."""
    lines_waiting: int = 0
    """Of `waiting`, lines of batch jobs."""
    lines_in_flight: int = 0
    """Of `in_flight`."""


class ModelOutlook(Struct, frozen=True, omit_defaults=True):
    """What the planner expects of a model, for gateways."""

    state: str
    """serving, loading, asleep, host (in a worker's host memory), disk, failed."""
    wait_s: float = 0.0
    """What a request that comes now is expected to wait for it."""
    ready_unix_ms: int = 0
    """Where it is being loaded: when it is expected to be there."""
    error: str = ""
    """Why it could not be loaded the last time, while it is not tried again."""
