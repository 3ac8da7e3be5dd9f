"""The ledger of limits in memory, with the arithmetic that the Redis adapter repeats in scripts."""

from collections.abc import Callable, Mapping

from libs.policy.gateway.usage import MinuteWindow, held
from libs.stores.limits import HOLD_S, MAX_REPORT_BYTES, REPORT_HOLD_S, SPANS, Grant, Kind, LedgerDown


class MemoryLedger:
    """A ledger of one cluster for several gateways of one process. `away` makes it unreachable."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._windows: dict[tuple[str, Kind], MinuteWindow] = {}
        self._held: dict[str, dict[str, tuple[int, float]]] = {}
        self._gateways: dict[str, float] = {}
        self._reports: dict[str, tuple[bytes, float]] = {}
        self.away = False
        self.calls = 0

    async def take(self, tenant: str, kind: Kind, limit: int, *, want: int, least: int) -> Grant:
        self._check()
        window, now_s = self._window(tenant, kind), self._now_s()
        granted = window.take(limit, want, least, now_s)
        wait_s = 0.0 if granted else window.wait_s(limit, max(least, 1), now_s)
        return Grant(granted, max(limit - window.used(now_s), 0), wait_s)

    async def add(self, tenant: str, kind: Kind, units: int) -> None:
        self._check()
        self._window(tenant, kind).add(units, self._now_s())

    async def hold(self, tenant: str, gateway_id: str, limit: int, *, running: int, want: int) -> int:
        self._check()
        now_s, held_by = self._now_s(), self._held.setdefault(tenant, {})
        others = sum(count for name, (count, ends_s) in held_by.items() if name != gateway_id and ends_s > now_s)
        held_by[gateway_id] = held(limit, others, running, want), now_s + HOLD_S
        return held_by[gateway_id][0]

    async def beat(self, gateway_id: str) -> int:
        self._check()
        self._gateways[gateway_id] = self._now_s() + HOLD_S
        return sum(ends_s > self._now_s() for ends_s in self._gateways.values())

    async def exchange(self, gateway_id: str, report: bytes) -> Mapping[str, bytes]:
        self._check()
        now_s = self._now_s()
        self._reports[gateway_id] = report, now_s + REPORT_HOLD_S if report else now_s
        found = {name: each for name, (each, ends_s) in self._reports.items() if name != gateway_id and ends_s > now_s}
        return {name: each for name, each in found.items() if len(name) + len(each) < MAX_REPORT_BYTES}

    async def close(self) -> None: ...

    def _check(self) -> None:
        self.calls += 1
        if self.away:
            raise LedgerDown("away")

    def _window(self, tenant: str, kind: Kind) -> MinuteWindow:
        return self._windows.setdefault((tenant, kind), MinuteWindow(SPANS[kind]))
