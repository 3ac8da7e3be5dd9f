"""Frames that carry only the load: a sign of life after a silence, and load changes without other news."""

from collections.abc import Callable
from typing import Final

from libs.contracts.protocol import RESTING_SIGN_OF_LIFE_MS, SIGN_OF_LIFE_MS
from libs.engine.reports import EngineLoad
from libs.lab.cluster.host.device import Device
from libs.lab.cluster.time import PS_PER_NS, START_PS, VirtualTime

_MS: Final = 1_000_000 * PS_PER_NS
BEAT_PS: Final = SIGN_OF_LIFE_MS * _MS
REST_PS: Final = RESTING_SIGN_OF_LIFE_MS * _MS
"""The interval between frames of an idle worker. They change nothing and are not sent here, only allowed for."""
# The default of live workers, which send a changed load with their telemetry.
TELEMETRY_PS: Final = 100 * _MS


class Beat:
    """The heartbeats of one worker. While it decodes, every step reports the load, and none are needed."""

    def __init__(self, time: VirtualTime, device: Device, send_load: Callable[[], None]) -> None:
        """`send_load` sends a frame and calls `reported`."""
        self._send_load = send_load
        self._time = time
        self._device = device
        self._reported_ps = time.now_ps
        self._reported: EngineLoad | None = None
        self._beats = False
        """Whether the next sign of life is scheduled."""
        self._ticks = False
        """Whether a comparison with the last reported load is scheduled."""

    def reported(self, load: EngineLoad, at_ps: int) -> None:
        """Record a load that a frame carried or would have carried."""
        self._reported, self._reported_ps = load, at_ps

    def watch(self, *, reported: bool) -> None:
        """Schedule heartbeats after an event at the worker; `reported` is whether a frame carries the event."""
        if not (reported or self._ticks):
            self._ticks = True
            passed_ps = self._time.now_ps - START_PS
            self._time.at_ps(START_PS + (passed_ps // TELEMETRY_PS + 1) * TELEMETRY_PS, self._tick)
        if not self._beats and self._has_work and not self._steps_report:
            self._beats = True
            self._reported_ps += (self._time.now_ps - self._reported_ps) // REST_PS * REST_PS
            self._time.at_ps(self._reported_ps + BEAT_PS, self._beat)

    @property
    def _has_work(self) -> bool:
        """Whether sequences are here, or blocks that wait to be pulled."""
        return self._device.core.holds_blocks

    @property
    def _steps_report(self) -> bool:
        """Whether steps pass at once and none of them takes longer than the permitted silence."""
        return 0 < self._device.longest_coasting_ps < BEAT_PS

    def _beat(self) -> None:
        self._beats = False
        if not self._has_work or self._steps_report:
            return
        due_ps = max(self._reported_ps, self._device.last_coasted_ps) + BEAT_PS
        if due_ps <= self._time.now_ps:
            self._send_load()
            due_ps = self._time.now_ps + BEAT_PS
        self._beats = True
        self._time.at_ps(due_ps, self._beat)

    def _tick(self) -> None:
        self._ticks = False
        if self._device.last_coasted_ps > self._reported_ps:
            return  # that step has reported the load
        if self._reported is None or _depths(self._device.core.load()) != _depths(self._reported):
            self._send_load()


def _depths(load: EngineLoad) -> tuple[int, ...]:
    """Return the queue depths that gateways use."""
    return (
        load.running,
        load.waiting,
        load.waiting_prefill_tokens,
        load.waiting_prefill_squares,
        load.awaiting_kv,
        load.free_kv_blocks,
    )
