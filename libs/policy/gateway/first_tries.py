"""How many workers an untried prompt may be on before one of them is known to survive it.

A prompt that kills workers is recognized once two of them have died. Requests with the same prompt arriving at once
would reach every worker before the first is lost. So only as many go at a time as a prompt may kill, and the others
wait until one has a token. Tenants are counted separately: the wait of a request must not reveal another tenant's
prompts.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from libs.policy.gateway.suspicion import MAX_LOST_WORKERS, Prompt

MAX_COMPUTED: Final = 4096
"""The most prompts remembered for a recent token; beyond it the oldest are forgotten."""
COMPUTED_NS: Final = 60_000_000_000
"""The time after its last first token in which a prompt may go to any number of workers."""

Key = tuple[str, Prompt]
"""A tenant and the fingerprint of its prompt."""
T = TypeVar("T", bound=Hashable)


class _Tries(Generic[T]):
    def __init__(self) -> None:
        self.waiting: dict[T, None] = {}
        self.on_workers: set[T] = set()


class FirstTries(Generic[T]):
    """The choices whose prompt has had no token lately, from arrival until one has."""

    def __init__(self) -> None:
        self._keys: dict[T, Key] = {}
        self._tries: dict[Key, _Tries[T]] = {}
        # By prompt, the time of its last first token.
        self._computed: OrderedDict[Key, int] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._tries)

    def came(self, choice: T, key: Key, now_ns: int) -> None:
        """Record that a choice begins to wait for workers."""
        if now_ns - self._computed.get(key, -COMPUTED_NS) >= COMPUTED_NS:
            self._keys[choice] = key
            self._tries.setdefault(key, _Tries()).waiting[choice] = None

    def bound(self, choice: T) -> None:
        """Record that a waiting choice goes to workers."""
        if (tries := self._of(choice)) is not None:
            tries.waiting.pop(choice, None)
            tries.on_workers.add(choice)

    def waits(self, choice: T) -> None:
        """Record that a choice left its workers without a token and waits for others."""
        if (tries := self._of(choice)) is not None:
            tries.on_workers.discard(choice)
            tries.waiting[choice] = None

    def computed(self, key: Key, now_ns: int) -> None:
        """Record a choice's first token, after which others with the prompt go wherever there is room."""
        self._computed[key] = now_ns
        self._computed.move_to_end(key)
        if len(self._computed) > MAX_COMPUTED:
            self._computed.popitem(last=False)
        tries = self._tries.pop(key, None)
        if tries is not None:
            for each in (*tries.waiting, *tries.on_workers):
                del self._keys[each]

    def ended(self, choice: T) -> None:
        """Forget a choice that is over, with a token or without."""
        key = self._keys.pop(choice, None)
        if key is None:
            return
        tries = self._tries[key]
        tries.waiting.pop(choice, None)
        tries.on_workers.discard(choice)
        if not tries.waiting and not tries.on_workers:
            del self._tries[key]

    def waiting_with(self, choice: T) -> list[T]:
        """Return the waiting choices of the same tenant and prompt, this one included if it waits."""
        tries = self._of(choice)
        return [] if tries is None else list(tries.waiting)

    def round(self) -> Callable[[T], bool]:
        """Return a predicate for one binding round: whether a waiting choice may go to workers.

        It counts the choices it has allowed in this round.
        """
        gone: Counter[Key] = Counter()

        def may_start(choice: T) -> bool:
            key = self._keys.get(choice)
            if key is None:
                return True
            if len(self._tries[key].on_workers) + gone[key] >= MAX_LOST_WORKERS:
                return False
            gone[key] += 1
            return True

        return may_start

    def _of(self, choice: T) -> _Tries[T] | None:
        key = self._keys.get(choice)
        return None if key is None else self._tries[key]
