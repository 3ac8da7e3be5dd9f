"""Step-time fits on disk.

There is a small JSON file for each engine, model, device, variant and kind of step, and one for the last
measurement of prefill.
"""

import asyncio
import fcntl
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import structlog
from google.protobuf import json_format
from google.protobuf.message import Message

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import StepTime
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.perfmodel.learner import FittedModel, StepKind
from libs.perfmodel.wire import curve_message, fitted_model, prefill_curve, step_time_message
from libs.policy.worker.saturation import PrefillCurve
from libs.stores.steps.port import StepTimeKey

log = structlog.get_logger()

MAX_FILE_BYTES = 65_536
CURVE = "prefill-curve"
"""The name of the curve's file, beside those named after kinds of steps."""
LOCK = "measuring.lock"

MessageT = TypeVar("MessageT", bound=Message)


class FileStepTimes:
    """A StepTimeStore in a folder, which need not exist. Files are replaced atomically, so workers may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks: dict[StepTimeKey, int] = {}
        """File descriptors of the locks that are held."""

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        """Return the fits whose files exist and can be read."""
        return await asyncio.to_thread(self._fits, key)

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        """Write the fits. If the folder is not writable, log a warning instead of raising."""
        await self._save(key, {kind.value: step_time_message(fit) for kind, fit in fits.items()})

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """Return the curve if its file exists and can be read."""
        found = await asyncio.to_thread(_read, self._file(key, CURVE), pb.PrefillCurve)
        return prefill_curve(found) if found is not None else None

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None:
        """Write the curve. If the folder is not writable, log a warning instead of raising."""
        await self._save(key, {CURVE: curve_message(curve)})

    async def claim(self, key: StepTimeKey, *, lease_s: float) -> bool:
        """Claim by a file lock, which the system drops with its holder. A folder without locks grants every claim."""
        try:
            return await asyncio.to_thread(self._lock, key)
        except OSError as error:
            log.warning("measuring is not locked on disk", folder=str(self._folder), error=str(error))
            return True

    async def release(self, key: StepTimeKey) -> None:
        # The lock's file stays.
        if (lock := self._locks.pop(key, None)) is not None:
            os.close(lock)

    async def close(self) -> None:
        for key in list(self._locks):
            await self.release(key)

    def _lock(self, key: StepTimeKey) -> bool:
        path = self._place(key) / LOCK
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._locks[key] = lock
        return True

    def _place(self, key: StepTimeKey) -> Path:
        return self._folder.joinpath(*(quote(part, safe=" ,@") or "-" for part in key.parts))

    def _file(self, key: StepTimeKey, name: str) -> Path:
        return self._place(key) / f"{name}.json"

    def _fits(self, key: StepTimeKey) -> dict[StepKind, FittedModel]:
        found = {kind: _read(self._file(key, kind.value), StepTime) for kind in StepKind}
        fits = {kind: fitted_model(message) for kind, message in found.items() if message is not None}
        return {kind: fit for kind, fit in fits.items() if fit is not None}

    async def _save(self, key: StepTimeKey, messages: Mapping[str, Message]) -> None:
        try:
            for name, message in messages.items():
                await asyncio.to_thread(_write, self._file(key, name), message)
        except OSError as error:
            log.warning("step times are not kept on disk", folder=str(self._folder), error=str(error))


def _read(path: Path, kind: type[MessageT]) -> MessageT | None:
    try:
        with path.open() as file:
            return json_format.Parse(file.read(MAX_FILE_BYTES), kind())
    except (OSError, ValueError, json_format.ParseError):
        return None


def _write(path: Path, message: Message) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w") as fresh:
            fresh.write(json_format.MessageToJson(message, preserving_proto_field_name=True))
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
