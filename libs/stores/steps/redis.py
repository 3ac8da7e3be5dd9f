"""Step-time fits in Redis.

Each engine, model, device and variant has a hash with one serialized fit per kind of step and the last measurement
of prefill. While a worker measures, its lease is stored beside the hash.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Mapping
from typing import Any, Final

import structlog
from google.protobuf.message import DecodeError
from redis.exceptions import RedisError

from libs.contracts import keys
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import StepTime
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.perfmodel.learner import FittedModel, StepKind
from libs.perfmodel.wire import curve_message, fitted_model, prefill_curve, step_time_message
from libs.policy.worker.saturation import PrefillCurve
from libs.runtime.redis import is_wrong_type, make_redis
from libs.stores.steps.port import StepTimeKey

log = structlog.get_logger()

SOCKET_TIMEOUT_MS = 500
CALL_TIMEOUT_S = 1.5
CURVE_FIELD: Final = "prefill-curve"
"""The field of the curve, beside those named after kinds of steps."""
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""


class RedisStepTimes:
    """A StepTimeStore over Redis 6.2 or later. Only leases expire, since a device will be as fast next week."""

    def __init__(self, url: str, cluster: str) -> None:
        self._cluster = cluster
        self._redis = make_redis(url, timeout_ms=SOCKET_TIMEOUT_MS)
        self._drop = self._redis.register_script(_RELEASE)
        self._token = secrets.token_hex(8)
        """The token that identifies this store's leases."""
        self._away = False
        """Whether the present outage has been logged."""

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
            log.warning("step times replace what is no hash", key=key)
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
