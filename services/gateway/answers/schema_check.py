"""Whether JSON schemas can be kept to, found out in a process that can be ended, and remembered."""

import asyncio
import json
import signal
import sys
from collections import OrderedDict
from typing import NamedTuple

from libs.contracts.errors import QueueFull
from libs.dispatch.fair_slots import FairSlots
from libs.dispatch.ports import Tenancy
from libs.dispatch.waiting import RETRY_AFTER_S
from libs.model.grammar import MAX_CPU_S, MAX_MEMORY_BYTES

MAX_CHECKED = 256
"""Schemas whose verdict is remembered."""
MAX_CHECKED_CHARS = 8 * 1024 * 1024
"""Of all remembered schemas, as they came and as they are kept to."""
MAX_CHECKS = 2
"""At a time."""
MAX_WAITING = 32
"""Schemas that wait for it; more are refused with 429."""
MAX_CHECK_S = 20.0
"""By the clock, on a machine that has other things to do: no verdict then, but 429."""
_OUT_OF_TIME = (-signal.SIGKILL, -signal.SIGXCPU)
MAX_REASON_CHARS = 300


class Verdict(NamedTuple):
    """What the check of a schema, or of a rule, has found."""

    fault: str
    """Why it cannot be kept to; empty where it can."""
    schema: str = "{}"
    """JSON: an equal or stricter schema, as the grammar library reads it. Of no meaning for a rule."""


class SchemaCheck:
    """Verdicts by schema."""

    def __init__(self, tenants: Tenancy | None = None) -> None:
        """tenants: who share the checks; None: all requests are alike."""
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._chars = 0
        full = f"{MAX_CHECKS} schemas are checked at a time, and too many wait: others need room too"
        self.slots = FairSlots(MAX_CHECKS, MAX_WAITING, full, tenants=tenants)
        self._checks: dict[tuple[str, str], asyncio.Lock] = {}
        """By tenant and schema, of those that are checked or wait for it."""

    async def verdict(self, schema: str, tenant: str = "") -> Verdict:
        """On a schema, or a rule, as JSON. Raises QueueFull where too many are checked."""
        found = self._verdicts.get(schema)
        if found is None:
            found = await self._check(schema, tenant)
        else:
            self._verdicts.move_to_end(schema)
        return found

    async def _check(self, schema: str, tenant: str) -> Verdict:
        """Once, however many of the tenant's requests wait for it."""
        async with self._checks.setdefault((tenant, schema), asyncio.Lock()):
            found = self._verdicts.get(schema)
            if found is not None:
                return found
            try:
                async with self.slots.slot(tenant):
                    found = await _ask(schema)
            finally:
                self._checks.pop((tenant, schema), None)
        # Another tenant's check of the same schema may have ended meanwhile.
        if schema not in self._verdicts:
            self._verdicts[schema] = found
            self._chars += _chars(schema, found)
        while len(self._verdicts) > MAX_CHECKED or self._chars > MAX_CHECKED_CHARS:
            self._chars -= _chars(*self._verdicts.popitem(last=False))
        return found


def _chars(schema: str, verdict: Verdict) -> int:
    return len(schema) + len(verdict.fault) + len(verdict.schema)


async def _ask(schema: str) -> Verdict:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "libs.model.grammar"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(MAX_CHECK_S):
            said, _ = await child.communicate(schema.encode())
    except TimeoutError:
        raise QueueFull("the schema could not be checked in time", retry_after_s=RETRY_AFTER_S) from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode in _OUT_OF_TIME:
        return Verdict(f"it takes more than {MAX_CPU_S} s to compile")
    if child.returncode is None or child.returncode > 0:
        raise RuntimeError(f"the check of a schema ended with {child.returncode}")
    if child.returncode:
        return Verdict(f"it takes more than {MAX_MEMORY_BYTES} bytes to compile")
    found = json.loads(said)
    return Verdict(found["fault"][:MAX_REASON_CHARS], json.dumps(found["schema"]))
