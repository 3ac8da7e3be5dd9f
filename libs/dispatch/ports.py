"""The dispatcher's ports: links to workers and time.

Live, these are gRPC streams and the event loop; a discrete-event driver brings its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from libs.contracts.errors import FulcrumError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.worker_news import WorkerNews
from libs.policy.gateway.outlook import WorkerOutlook
from libs.policy.gateway.placement import Attempt, Blocks, Partner, WorkerKey
from libs.policy.gateway.view import WorkerView


class Work(Protocol):
    """A choice as its link sees it."""

    @property
    def batch(self) -> bool:
        """Whether it is a line of a batch job rather than an interactive request."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, without generated ones."""
        ...

    @property
    def tokens(self) -> int:
        """Number of prompt and output tokens so far."""
        ...

    @property
    def cached_hints(self) -> Mapping[str, int]:
        """Prompt tokens that workers are believed to hold, by worker id."""
        ...

    def message(self, attempt: Attempt, blocks: Blocks | None, epoch: int) -> pb.Submit:
        """Return the submit that has a worker continue from all tokens so far."""
        ...


class QueuedDemand(NamedTuple):
    """A model's queue at this gateway, as it is sent to the model's workers."""

    waiting: int = 0
    waiting_tokens: int = 0
    head_deadline_unix_ns: int = 0


class Link(Protocol):
    """One worker, which knows sequences by their ids alone. All methods are synchronous; the link sends by itself."""

    id: str
    key: WorkerKey
    outlook: WorkerOutlook

    @property
    def model(self) -> str:
        """The model of its assignment; empty while it cannot be reached."""
        ...

    def partner(self) -> Partner | None:
        """Return the worker as a decode partner, or None while it cannot be reached."""
        ...

    def quiet(self, sequence_id: int) -> bool:
        """Return whether the worker has been silent since a sequence was sent there, so that it may have been dead
        already.
        """
        ...

    def submit(self, attempt: Attempt, work: Work, blocks: Blocks | None) -> None:
        """Send work against a prompt credit, or against the decode credit reserved for it."""
        ...

    def proceed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Continue a streamed sequence whose prompt is computed elsewhere and produced these tokens."""
        ...

    def hand_over(self, sequence_id: int) -> None:
        """Have the worker hand a running sequence over. Its place elsewhere is reserved."""
        ...

    def forget(self, sequence_id: int, *, abort: bool) -> None:
        """Ignore a sequence from now on. `abort` also ends it at the worker, or frees the blocks it left."""
        ...

    def reserve(self, prompt_tokens: int) -> None:
        """Reserve a decode credit for a sequence with such a prompt."""
        ...

    def release(self, prompt_tokens: int) -> None:
        """Return the credit that was reserved for a sequence with such a prompt."""
        ...

    def set_demand(self, demand: QueuedDemand) -> None: ...


class Links(Protocol):
    @property
    def links(self) -> Iterable[Link]:
        """All links, including those still connecting."""
        ...

    @property
    def quiet(self) -> frozenset[str]:
        """Ids of workers that have been silent for a moment. They get new work only if there are no others."""
        ...

    def link(self, key: WorkerKey) -> Link | None: ...

    def serving(self) -> Mapping[str, Link]:
        """Return the links of workers that accept work now, by id."""
        ...

    def views(self) -> list[WorkerView]:
        """Return the same workers as a binding round sees them."""
        ...

    def drop_gone(self) -> None:
        """Drop links that are down for good."""
        ...


class ColdModels(Protocol):
    """The outlook for models that no worker serves now."""

    def covers(self, name: str) -> bool:
        """Return whether this gateway knows the fate of requests that wait for the model."""
        ...

    def ends(self, name: str, waited_s: float, *, begun: bool = False) -> FulcrumError | None:
        """Return the error that ends such a request, or None if it goes on waiting. `begun` says that it has output
        already.
        """
        ...


class Tenancy(Protocol):
    """The tenants that share the queue and the workers."""

    @property
    def told_apart(self) -> bool:
        """Whether tenants are authenticated, so that one may be held back for another."""
        ...

    def weight(self, tenant: str) -> int:
        """Return the tenant's weight in turns and places; the default is 1."""
        ...


class OneForAll:
    """Unauthenticated tenants: anyone may name any of them, so turns count alike and no one is held back."""

    @property
    def told_apart(self) -> bool:
        return False

    def weight(self, _tenant: str) -> int:
        return 1


class LinkListener(Protocol):
    """Receives the events of a link; live it is the `Dispatcher`."""

    def received(self, link: Link, news: WorkerNews) -> None:
        """Process a frame whose credits, load and assignment the link has applied."""
        ...

    def lost(self, link: Link, *, silent: bool, died: bool) -> None:
        """Handle a broken stream, or one that was ended because it was silent.

        Sequences there, and those with a reserved decode credit, have to go elsewhere. `died` says that the worker
        does not seem to have left on purpose.
        """
        ...

    def unreachable(self, link: Link) -> None:
        """Handle that the worker of a broken stream could not be reached, or that another one was in its place."""
        ...
