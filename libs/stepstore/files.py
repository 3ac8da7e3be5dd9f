"""Step-time fits on disk: a small JSON file for each engine, model, device and kind of step."""

import asyncio
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import structlog
from google.protobuf import json_format

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import StepTime
from libs.perfmodel import FittedModel, StepKind
from libs.perfmodel.wire import fitted_model, step_time_message
from libs.stepstore.port import StepTimeKey

log = structlog.get_logger()

MAX_FILE_BYTES = 65_536


class FileStepTimes:
    """StepTimeStore in a folder, which need not exist. Files are replaced whole, so workers may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        """What is there and can be read."""
        return await asyncio.to_thread(self._read, key)

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        """Write the kinds; a folder that cannot be written to is told and nothing more."""
        try:
            await asyncio.to_thread(self._write, key, fits)
        except OSError as error:
            log.warning("step times are not kept on disk", folder=str(self._folder), error=str(error))

    async def close(self) -> None:
        """Nothing to disconnect."""

    def _file(self, key: StepTimeKey, kind: StepKind) -> Path:
        names = (quote(part, safe=" ") or "-" for part in (key.engine, key.model, key.device))
        return self._folder.joinpath(*names) / f"{kind.value}.json"

    def _read(self, key: StepTimeKey) -> dict[StepKind, FittedModel]:
        fits = {}
        for kind in StepKind:
            try:
                with self._file(key, kind).open() as file:
                    fit = fitted_model(json_format.Parse(file.read(MAX_FILE_BYTES), StepTime()))
            except (OSError, ValueError, json_format.ParseError):
                continue
            if fit is not None:
                fits[kind] = fit
        return fits

    def _write(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        for kind, fit in fits.items():
            file = self._file(key, kind)
            file.parent.mkdir(parents=True, exist_ok=True)
            text = json_format.MessageToJson(step_time_message(fit), preserving_proto_field_name=True)
            handle, name = tempfile.mkstemp(dir=file.parent)
            try:
                with os.fdopen(handle, "w") as fresh:
                    fresh.write(text)
                Path(name).replace(file)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
