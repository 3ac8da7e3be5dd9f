"""The data behind the screen, built from the stream's messages: each worker's last windows, and sums. Pure."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from libs.cli.status.answer import Status

# Windows of 100 ms that are kept: half a minute.
KEPT: Final = 300
WINDOW_NS: Final = 100_000_000
FIGURE: Final = 20
"""The number of windows that figures cover."""
MAX_LINES: Final = 50
PROVISIONAL: Final = 0x80
Times = tuple[int, int, int, int]
"""GPU nanoseconds: covered, in prefill, in decode, waiting for KV."""
NOTHING: Final[Times] = (0, 0, 0, 0)


@dataclass(slots=True)
class WorkerRow:
    """One worker: its newest windows by start, and its last report."""

    id: str
    node: str
    model: str
    gpus: int
    group: str = ""
    """The data-parallel group of which the worker is a rank, or ""."""
    role: str = ""
    life: str = ""
    """The worker's state unless it is simply running."""
    windows: dict[int, Times] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    tokens: int = 0
    kv_used: float | None = None
    mfu: float | None = None
    mbu: float | None = None
    dummy: float | None = None
    """The share of the worker's time in dummy steps, which is part of idle."""
    encode: float | None = None
    """The share of the worker's time in steps that encode images, which is part of prefill."""
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def label(self) -> str:
        return self.id

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a filter finds it."""
        return (self.id, self.node, self.role, self.model)

    def spent(self, last_ms: int, count: int = FIGURE) -> Times:
        """Return sums over the windows up to the one that starts at `last_ms`."""
        return total(self.windows.get(last_ms - 100 * back, NOTHING) for back in range(count))


@dataclass(slots=True)
class GroupRow:
    """A data-parallel group: one row whose figures are sums over its ranks."""

    model: str
    name: str
    ranks: list[WorkerRow] = field(default_factory=list)
    kv_used: float | None = None
    dummy: float | None = None
    mfu: float | None = None
    mbu: float | None = None

    @property
    def id(self) -> str:
        """Return an id that cannot be that of a worker."""
        return f"group:{self.model}/{self.name}"

    @property
    def label(self) -> str:
        return f"{self.name} ×{len(self.ranks)}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a filter finds it, those of the group's ranks included."""
        return (self.name, *(name for rank in self.ranks for name in rank.names))

    @property
    def life(self) -> str:
        """The state of the group's first rank that is not simply running."""
        return next((rank.life for rank in self.ranks if rank.life), "")

    @property
    def node(self) -> str:
        """The node of the group's ranks, or the number of their nodes."""
        nodes = {rank.node for rank in self.ranks}
        return next(iter(nodes)) if len(nodes) == 1 else f"{len(nodes)} nodes"

    @property
    def role(self) -> str:
        """The role of the group's first rank, according to the planner."""
        return self.ranks[0].role

    @property
    def gpus(self) -> int:
        return sum(rank.gpus for rank in self.ranks)

    @property
    def running(self) -> int:
        return sum(rank.running for rank in self.ranks)

    @property
    def waiting(self) -> int:
        return sum(rank.waiting for rank in self.ranks)

    @property
    def tokens(self) -> int:
        return sum(rank.tokens for rank in self.ranks)

    def spent(self, last_ms: int, count: int = FIGURE) -> Times:
        """Return sums over the windows up to the one that starts at `last_ms`."""
        return total(rank.spent(last_ms, count) for rank in self.ranks)


Row = WorkerRow | GroupRow


def total(times: Any) -> Times:
    """Return the sum of each time over all windows."""
    sums = [0, 0, 0, 0]
    for each in times:
        for place, value in enumerate(each):
            sums[place] += value
    return (sums[0], sums[1], sums[2], sums[3])


def ratio(times: Times) -> float | None:
    """Return prefill time over decode time; None without decode."""
    return times[1] / times[2] if times[2] else None


class TopModel:
    """The data of the screen, updated by each message."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerRow] = {}
        self.groups: dict[str, GroupRow] = {}
        self.lines: deque[tuple[int, str]] = deque(maxlen=MAX_LINES)
        """The events as lines of text, each with its Unix milliseconds."""
        self.firing: dict[str, dict[str, Any]] = {}
        self.status: Status | None = None
        """The last answer of `/v1/status`; None before the first."""
        self.requests: dict[str, Any] = {}
        """The last answer of `/v1/requests/summary`; empty before the first."""
        self.queues: list[dict[str, Any]] = []
        """The work that waits at workers and gateways, by model and phase."""
        self.age_ms: int | None = None
        """The age of the data at the last tick that gave one; None without workers."""
        self.last_ms = 0
        """The start of the newest settled window."""
        self._sums: dict[int, Times] = {}
        """The sums over all workers by start of the window."""
        self._listed: list[WorkerRow] = []
        self._roles: tuple[str, ...] = ()
        self._settled_ms = 400

    def members(self, message: dict[str, Any]) -> None:
        self._roles = ("", *message["roles"])
        self._settled_ms = message["settled_ms"]
        known, self._listed = self.workers, []
        for member in message["workers"]:
            view = known.get(member["id"]) or WorkerRow(member["id"], "", "", 1)
            view.node, view.model, view.gpus = member["node"], member["model"], member["gpus"]
            view.group = member.get("group", "")  # missing in answers of an older service
            self._listed.append(view)
        self.workers = {view.id: view for view in self._listed}
        known_groups, self.groups = self.groups, {}
        for view in sorted(self._listed, key=lambda each: each.id):
            if view.group:
                group = GroupRow(view.model, view.group)
                self.groups.setdefault(group.id, group).ranks.append(view)
        for name, group in self.groups.items():
            if before := known_groups.get(name):
                group.kv_used, group.dummy = before.kv_used, before.dummy

    def lives(self) -> dict[str, str]:
        """Return the state of each worker that is not simply running."""
        known = self.status.workers if self.status is not None else []
        return {each.id: each.life for each in known if each.life != "running"}

    @property
    def rows(self) -> list[Row]:
        """Return groups, and workers without a group."""
        lives = self.lives()
        for worker in self.workers.values():
            worker.life = lives.get(worker.id, "")
        return [*self.groups.values(), *(worker for worker in self.workers.values() if not worker.group)]

    def tick(self, message: dict[str, Any]) -> None:
        """Apply windows of 100 ms, or the changes between two of them."""
        for start_ms, places, covered, prefill, decode, kv_wait, roles in message["windows"]:
            views = self._listed if places is None else [self._listed[place] for place in places]
            for view, role, *times in zip(views, roles, covered, prefill, decode, kv_wait, strict=False):
                spent = (view.gpus * times[0], view.gpus * times[1], view.gpus * times[2], view.gpus * times[3])
                before = view.windows.get(start_ms, NOTHING)
                sums = self._sums.setdefault(start_ms, NOTHING)
                self._sums[start_ms] = total((sums, spent, tuple(-time for time in before)))
                view.windows[start_ms] = spent
                view.role = self._roles[role % PROVISIONAL]
                while len(view.windows) > KEPT:
                    del view.windows[next(iter(view.windows))]
        while len(self._sums) > KEPT:
            del self._sums[next(iter(self._sums))]
        self.last_ms = (message["now_unix_ms"] - self._settled_ms) // 100 * 100 - 100
        if message["depths"] is not None:
            self._depths(message["depths"])
            self.queues = message["queues"]
            self.age_ms = message["age_ms"]
        for event in message["events"]:
            what = f"{event['worker']} → {event['role']}" if event["worker"] else event["action"]
            self.lines.append((event["unix_ms"], f"{what}  {event['reason']}".strip()))
        for alert in message["alerts"]:
            self.alert(alert)

    def _depths(self, depths: dict[str, list[int]]) -> None:
        for place, view in enumerate(self._listed[: len(depths["running"])]):
            view.running, view.waiting = depths["running"][place], depths["waiting"][place]
            view.tokens = depths["waiting_prefill_tokens"][place]

    def alert(self, alert: dict[str, Any]) -> None:
        over = alert["state"] != "firing"
        if over:
            self.firing.pop(alert["id"], None)
        else:
            self.firing[alert["id"]] = alert
        line = f"{'✓' if over else '▲'} {alert['name']}  {alert['ended_because'] or alert['reason']}"
        self.lines.append((alert["ended_unix_ms"] or alert["started_unix_ms"], line))

    def detail(self, occupancy: dict[str, Any]) -> None:
        """Take the further figures of `/v1/occupancy` about each worker."""
        for reported in occupancy["workers"]:
            view = self.workers.get(reported["id"])
            if view is None:
                continue
            view.kv_used, view.dummy = reported["kv_used"], reported.get("dummy")
            view.encode = reported.get("encode")
            used = (reported["utilisation"] or {}).get("prefill" if view.role == "prefill" else "decode") or {}
            view.mfu, view.mbu = used.get("mfu"), used.get("mbu")
        for reported in occupancy.get("groups", ()):
            if group := self.groups.get(reported["scope"]):
                group.kv_used, group.dummy = reported["kv_used"], reported["dummy"]

    def spent(self, views: Any, count: int = FIGURE) -> Times:
        """Return sums over the newest settled windows of some workers."""
        return total(view.spent(self.last_ms, count) for view in views)

    def queue(self, phase: str) -> tuple[int, int] | None:
        """Return (requests, prompt tokens to compute) that wait for a phase; None while unknown."""
        queues = [queue for queue in self.queues if queue["phase"] == phase]
        if any(queue["requests"] is None for queue in queues):
            return None
        return sum(queue["requests"] for queue in queues), sum(queue["prompt_tokens"] for queue in queues)

    def trend(self, cells: int) -> list[float | None]:
        """Return the P:D ratio of each half second, the newest last."""
        found = []
        for cell in range(cells - 1, -1, -1):
            starts = [self.last_ms - 100 * (5 * cell + step) for step in range(5)]
            found.append(ratio(total(self._sums.get(start, NOTHING) for start in starts)))
        return found
