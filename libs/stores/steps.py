"""Step times that workers have learned, from which later workers start: the port, on disk, in Redis, and layered."""

import asyncio
import fcntl
import os
import secrets
import tempfile
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote

import structlog
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from redis.exceptions import RedisError

from libs.contracts import keys
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import StepTime
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.perfmodel.learner import FittedModel, StepKind
from libs.perfmodel.wire import curve_message, fitted_model, prefill_curve, step_time_message
from libs.policy.worker.saturation import PrefillCurve
from libs.runtime.redis import is_wrong_type, make_redis

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StepTimeKey:
    """The key of step times. Workers with equal keys take the same time for the same step."""

    engine: str
    model: str
    """The model's name and the beginning of its revision, since names can be chosen freely."""
    device: str
    """The device and its kind, for example "cpu", "cuda:NVIDIA H200" or "sim:llama-8b-h100"."""
    variant: str = ""
    """Further properties that the engine considers decisive, e.g. "bfloat16, tp4, vllm 0.32.0"."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the key from the widest to the narrowest."""
        return self.engine, self.model, self.device, self.variant


class StepTimeStore(Protocol):
    """The latest fit for each kind of step and the latest measurement of prefill, by key.

    No method raises; a store that is away behaves like an empty one.
    """

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        """Return the last fit saved for each kind of step. Only the part for that kind counts."""
        ...

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        """Replace the fits of these kinds; those of other kinds stay."""
        ...

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """Return the last measurement of prefill that was saved."""
        ...

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None: ...

    async def claim(self, key: StepTimeKey, *, lease_s: float) -> bool:
        """Claim the measurement of prefill; return False if another user of this store holds the claim.

        The claim ends with `release`, at the caller's death, or after `lease_s` if the store cannot detect that death.
        A store that cannot be reached grants every claim.
        """
        ...

    async def release(self, key: StepTimeKey) -> None:
        """End the caller's claim, if it has one."""
        ...

    async def close(self) -> None:
        """Close the connection to the store. Safe to call twice."""
        ...


MAX_FILE_BYTES = 65_536
CURVE = "prefill-curve"
"""The name of the curve's file, beside those named after kinds of steps."""
LOCK = "measuring.lock"

MessageT = TypeVar("MessageT", bound=Message)


class FileStepTimes:
    """A StepTimeStore in a folder, which need not exist. Files are replaced atomically, so workers may share it.

    There is a small JSON file for each engine, model, device, variant and kind of step, and one for the last
    measurement of prefill.
    """

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
            log.warning(
                "no lock file: workers may measure at the same time", folder=str(self._folder), error=str(error)
            )
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


SOCKET_TIMEOUT_MS = 500
CALL_TIMEOUT_S = 1.5
CURVE_FIELD: Final = "prefill-curve"
"""The field of the curve, beside those named after kinds of steps."""
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""


class RedisStepTimes:
    """A StepTimeStore over Redis 6.2 or later. Only leases expire, since a device will be equally fast next week.

    Each engine, model, device and variant has a hash with one serialized fit per kind of step and the last
    measurement of prefill. While a worker measures, its lease is stored beside the hash.
    """

    def __init__(self, url: str, cluster: str) -> None:
        self._cluster = cluster
        self._redis = make_redis(url, timeout_ms=SOCKET_TIMEOUT_MS)
        self._drop = self._redis.register_script(_RELEASE)
        self._token = secrets.token_hex(8)
        """The token that identifies this store's leases."""
        self._away = False
        """True if the present outage has been logged."""

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        """Return the stored fits, or none while Redis is away."""
        kinds = list(StepKind)
        found: Any = await self._bounded(self._redis.hmget(self._key(key), [kind.value for kind in kinds]))
        values = zip(kinds, found, strict=True) if isinstance(found, list) else ()
        fits = {kind: _decode(value) for kind, value in values if value is not None}
        return {kind: fit for kind, fit in fits.items() if fit is not None}

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        """Write the fits. They are lost while Redis is away, and the next save repeats them."""
        values: dict[Any, Any] = {kind.value: step_time_message(fit).SerializeToString() for kind, fit in fits.items()}
        if values:
            await self._put(self._key(key), values)

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """Return the stored curve, or None while Redis is away."""
        found: Any = await self._bounded(self._redis.hget(self._key(key), CURVE_FIELD))
        try:
            return prefill_curve(pb.PrefillCurve.FromString(found)) if isinstance(found, bytes) else None
        except DecodeError:
            return None

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None:
        """Write the curve, which is lost while Redis is away."""
        value: Any = curve_message(curve).SerializeToString()
        await self._put(self._key(key), {CURVE_FIELD: value})

    async def claim(self, key: StepTimeKey, *, lease_s: float) -> bool:
        """Claim by a key that expires. Every claim is granted while Redis is away."""
        lease = keys.step_time_lease(self._cluster, *key.parts)
        given = await self._bounded(self._redis.set(lease, self._token, nx=True, px=max(round(lease_s * 1000), 1)))
        return bool(given) or self._away

    async def release(self, key: StepTimeKey) -> None:
        """Remove the claim's key if it still belongs to this store."""
        lease = keys.step_time_lease(self._cluster, *key.parts)
        await self._bounded(self._drop(keys=[lease], args=[self._token]))

    async def close(self) -> None:
        await self._redis.aclose()

    def _key(self, key: StepTimeKey) -> str:
        return keys.step_time(self._cluster, *key.parts)

    async def _put(self, key: str, values: dict[Any, Any]) -> None:
        """Set fields, replacing a key of another type, which must be foreign."""
        if is_wrong_type(await self._bounded(self._redis.hset(key, mapping=values))):
            log.warning("step times overwrite a key that is not a hash", key=key)
            await self._bounded(self._redis.unlink(key))
            await self._bounded(self._redis.hset(key, mapping=values))

    async def _bounded(self, call: Awaitable[Any]) -> Any:
        """Return the result, None while Redis is away, or the error itself if the key has another type."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                answer = await call
        except (RedisError, OSError, TimeoutError) as error:
            if is_wrong_type(error):
                return error
            if not self._away:
                log.warning("step times are not shared: redis is away", error=str(error))
            self._away = True
            return None
        self._away = False
        return answer


def _decode(value: bytes) -> FittedModel | None:
    try:
        return fitted_model(StepTime.FromString(value))
    except DecodeError:
        return None


class LayeredStepTimes:
    """A store that saves to all others. The first with a kind of step provides it; the latest curve counts."""

    def __init__(self, stores: Sequence[StepTimeStore]) -> None:
        self._stores = stores

    async def load(self, key: StepTimeKey) -> Mapping[StepKind, FittedModel]:
        found: dict[StepKind, FittedModel] = {}
        for store in self._stores:
            found = {**await store.load(key), **found}
        return found

    async def save(self, key: StepTimeKey, fits: Mapping[StepKind, FittedModel]) -> None:
        for store in self._stores:
            await store.save(key, fits)

    async def load_curve(self, key: StepTimeKey) -> PrefillCurve | None:
        """Return the curve measured last, since a worker of another host may have measured later than this host's."""
        found = [curve for store in self._stores if (curve := await store.load_curve(key)) is not None]
        return max(found, key=lambda curve: curve.unix_ns, default=None)

    async def save_curve(self, key: StepTimeKey, curve: PrefillCurve) -> None:
        for store in self._stores:
            await store.save_curve(key, curve)

    async def claim(self, key: StepTimeKey, *, lease_s: float) -> bool:
        """Claim in every store; return whether all of them granted it."""
        for number, store in enumerate(self._stores):
            if not await store.claim(key, lease_s=lease_s):
                for earlier in self._stores[:number]:
                    await earlier.release(key)
                return False
        return True

    async def release(self, key: StepTimeKey) -> None:
        for store in self._stores:
            await store.release(key)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()
