"""What the dispatcher stands on: links to workers, all of them together, and time. Live, these are gRPC streams and the
event loop; a discrete-event driver brings its own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from libs.contracts.errors import FulcrumError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.worker_news import WorkerNews
from libs.policy.gateway.effects import Attempt, Blocks, WorkerKey
from libs.policy.gateway.outlook import WorkerOutlook
from libs.policy.gateway.placement import Partner
from libs.policy.gateway.view import WorkerView


class Work(Protocol):
    """What a worker is asked to do, as a link sees it."""

    @property
    def batch(self) -> bool:
        """Whether nobody waits for it in person."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, without generated ones."""
        ...

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        ...

    @property
    def cached_hints(self) -> Mapping[str, int]:
        """Prompt tokens that workers are thought to hold, by worker id."""
        ...

    def message(self, attempt: Attempt, blocks: Blocks | None, epoch: int) -> pb.Submit:
        """To go on from all tokens so far."""
        ...


class QueuedDemand(NamedTuple):
    """The queue of a model at this gateway, as its workers get it."""

    waiting: int = 0
    waiting_tokens: int = 0
    head_deadline_unix_ns: int = 0


class Link(Protocol):
    """One worker. It knows sequences by their ids alone. All sync: what is asked for leaves by itself."""

    id: str
    key: WorkerKey
    outlook: WorkerOutlook

    @property
    def model(self) -> str:
        """What it is assigned to; empty while it cannot be reached."""
        ...

    def partner(self) -> Partner | None:
        """As sequences that are to decode there see it; None while it cannot be reached."""
        ...

    def quiet(self, sequence_id: int) -> bool:
        """Whether it may have been dead already when a sequence was sent there: it has said nothing since."""
        ...

    def submit(self, attempt: Attempt, work: Work, blocks: Blocks | None) -> None:
        """Send work there against a prompt credit, or against the decode credit that is set aside for it."""
        ...

    def proceed(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """The prompt of a streamed sequence is computed, and these tokens were sampled there."""
        ...

    def hand_over(self, sequence_id: int) -> None:
        """Let it hand a running sequence over: its place elsewhere is reserved."""
        ...

    def forget(self, sequence_id: int, *, abort: bool) -> None:
        """Listen to a sequence no more; `abort` also ends it there, or frees the blocks it left."""
        ...

    def reserve(self, prompt_tokens: int) -> None:
        """Set a decode credit aside for a sequence with such a prompt."""
        ...

    def release(self, prompt_tokens: int) -> None:
        """Return the credit that was reserved for a sequence with such a prompt."""
        ...

    def set_demand(self, demand: QueuedDemand) -> None:
        """Tell it what waits."""
        ...


class Links(Protocol):
    """All workers of a gateway."""

    @property
    def links(self) -> Iterable[Link]:
        """All of them, also those that are being connected."""
        ...

    @property
    def quiet(self) -> frozenset[str]:
        """Ids of workers that have been silent for a moment: new work goes to others where there are any."""
        ...

    def link(self, key: WorkerKey) -> Link | None:
        """One of them."""
        ...

    def serving(self) -> Mapping[str, Link]:
        """Those that take work now, by id."""
        ...

    def views(self) -> list[WorkerView]:
        """The same as a binding round sees them."""
        ...

    def drop_gone(self) -> None:
        """Give up those that are down for good."""
        ...


class ColdModels(Protocol):
    """What is expected of models that no worker serves now."""

    def covers(self, name: str) -> bool:
        """Whether it is known here what becomes of requests that wait for the model."""
        ...

    def ends(self, name: str, waited_s: float, *, begun: bool = False) -> FulcrumError | None:
        """Why such a request waits no longer; None: it does. `begun`: tokens of it have come before."""
        ...


class Tenancy(Protocol):
    """Whose requests share the queue and the workers."""

    @property
    def told_apart(self) -> bool:
        """Whether a request's tenant is known for sure, so that one may be held back for another."""
        ...

    def weight(self, tenant: str) -> int:
        """Of its turns and its places, against 1 of others."""
        ...


class OneForAll:
    """Anybody may name any tenant: turns count alike, and nobody is held back."""

    @property
    def told_apart(self) -> bool:
        """They are not."""
        return False

    def weight(self, _tenant: str) -> int:
        """All alike."""
        return 1


class LinkListener(Protocol):
    """Receives the events of a link; live it is the `Dispatcher`."""

    def received(self, link: Link, news: WorkerNews) -> None:
        """A frame came; credits, load and assignment are in the link already."""
        ...

    def lost(self, link: Link, *, silent: bool, died: bool) -> None:
        """The stream broke, or was ended because it was silent: what ran there, and what had a decode credit there, has
        to go elsewhere. `died`: as far as can be seen the worker did not mean to leave."""
        ...

    def unreachable(self, link: Link) -> None:
        """After its stream broke the worker could not be reached, or another one was in its place."""
        ...
