"""The queue: choices that no worker has room for yet, counted by model."""

from collections import Counter
from collections.abc import Iterable, Iterator

from libs.contracts.errors import FulcrumError, NoWorkers, QueueFull
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import Demand
from services.gateway.binding import WorkerView
from services.gateway.generation import Generation
from services.gateway.order import order
from services.gateway.readiness import serves

RETRY_AFTER_S = 1.0


class WaitingQueue:
    """Bounded for new choices; one that lost its worker always finds its place again."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: dict[int, Generation] = {}
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, generation: Generation) -> bool:
        return generation.number in self._waiting

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._waiting.values()))

    def check_room(self, count: int) -> None:
        """Raises QueueFull when `count` more would pass the bound."""
        if len(self._waiting) + count > self._max_waiting:
            raise QueueFull(f"{self._max_waiting} requests are waiting already", retry_after_s=RETRY_AFTER_S)

    def add(self, generation: Generation) -> None:
        """Let it wait."""
        self._waiting[generation.number] = generation
        self._requests[generation.model] += 1
        self._tokens[generation.model] += generation.prompt_tokens

    def remove(self, generation: Generation) -> bool:
        """Whether it was waiting; it is not any more."""
        if self._waiting.pop(generation.number, None) is None:
            return False
        self._requests[generation.model] -= 1
        self._tokens[generation.model] -= generation.prompt_tokens
        return True

    def in_order(self) -> list[Generation]:
        """The next one first."""
        return order(self._waiting.values())

    def demand(self, model: str) -> Demand:
        """What workers of the model are told."""
        count = self._requests[model]
        if not count:
            return Demand()
        head = next(generation for generation in self.in_order() if generation.model == model)
        return Demand(
            waiting=count,
            waiting_tokens=self._tokens[model],
            head_deadline_unix_ns=head.context.ttft_deadline_unix_ns,
        )


def expired(
    waiting: Iterable[Generation],
    workers: list[WorkerView],
    *,
    now_ns: int,
    max_wait_ms: int,
    no_workers_wait_ms: int,
) -> list[tuple[Generation, FulcrumError]]:
    """Those that have waited too long, and what their clients are told. Pure."""
    found: list[tuple[Generation, FulcrumError]] = []
    for generation in waiting:
        waited_ms = (now_ns - generation.timeline.queued_ns) / 1e6
        if waited_ms >= no_workers_wait_ms and not serves(workers, generation.model):
            message = f"no worker serves model {generation.model!r} now"
            found.append((generation, NoWorkers(message, retry_after_s=RETRY_AFTER_S)))
        elif waited_ms >= max_wait_ms:
            message = f"no worker had room within {max_wait_ms} ms"
            found.append((generation, QueueFull(message, retry_after_s=RETRY_AFTER_S)))
    return found
