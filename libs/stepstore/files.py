"""Step-time fits on disk: a small JSON file for each engine, model, device and kind of step, and for the last
measurement of prefill."""

import asyncio
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
from libs.perfmodel import FittedModel, StepKind
from libs.perfmodel.saturation import PrefillCurve
from libs.perfmodel.wire import curve_message, fitted_model, prefill_curve, step_time_message
from libs.stepstore.port import StepTimeKey

log = structlog.get_logger()

MAX_FILE_BYTES = 65_536
CURVE = "prefill-curve"
"""Beside the files named for kinds of steps."""

MessageT = TypeVar("MessageT", bound=Message)


class FileStepTimes:
    """StepTimeStore in a folder, which need not exist. Files are replaced whole, so workers may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        """What is there and can be read."""
        return await asyncio.to_thread(self._fits, key)

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        """Write the kinds; a folder that cannot be written to is told and nothing more."""
        await self._save(key, {kind.value: step_time_message(fit) for kind, fit in fits.items()})

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """What is there and can be read."""
        found = await asyncio.to_thread(_read, self._file(key, CURVE), pb.PrefillCurve)
        return prefill_curve(found) if found is not None else None

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None:
        """Write it; a folder that cannot be written to is told and nothing more."""
        await self._save(key, {CURVE: curve_message(curve)})

    async def close(self) -> None:
        """Nothing to disconnect."""

    def _file(self, key: StepTimeKey, name: str) -> Path:
        names = (quote(part, safe=" ") or "-" for part in (key.engine, key.model, key.device))
        return self._folder.joinpath(*names) / f"{name}.json"

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
    """Replace the file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w") as fresh:
            fresh.write(json_format.MessageToJson(message, preserving_proto_field_name=True))
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
