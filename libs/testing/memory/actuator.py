"""An actuator in memory, whose workers are only names."""

from collections.abc import Callable, Mapping, Sequence

from libs.actuators.port import ActuatorDown, Started, to_end


class MemoryActuator:
    """An actuator that starts workers at once, unless it is set to be slow, to be away, or to lose them."""

    kind = "memory"

    def __init__(
        self,
        most: int = 4,
        model: str = "sim",
        on_start: Callable[[str], None] = lambda _: None,
        on_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.most = most
        self.model = model
        self.worker_ids: list[str] = []
        self.counts: list[int] = []
        self.shown: dict[str, str] = {}
        self.away = False
        self.slow = 0
        """The number of workers whose next start fails without notice."""
        self.without_machine: set[str] = set()
        """The workers that wait for a machine."""
        self._on_start = on_start
        self._on_end = on_end

    async def look(self) -> Started:
        self._check()
        return Started(tuple(self.worker_ids), self.most, self.model, frozenset(self.without_machine))

    async def have(self, count: int, *, first_to_end: Sequence[str] = ()) -> None:
        self._check()
        self.counts.append(count)
        for name in to_end(self.worker_ids, count, first_to_end):
            self.worker_ids.remove(name)
            self._on_end(name)
        free = (name for number in range(1, self.most + 1) if (name := f"spare-{number}") not in self.worker_ids)
        for name in list(free)[: max(min(count, self.most) - len(self.worker_ids), 0)]:
            if self.slow:
                self.slow -= 1
                continue
            self.worker_ids.append(name)
            self._on_start(name)

    async def show(self, roles: Mapping[str, str]) -> None:
        self._check()
        self.shown = dict(roles)

    async def close(self) -> None: ...

    def _check(self) -> None:
        if self.away:
            raise ActuatorDown("it is away")
