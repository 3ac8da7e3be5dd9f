"""Checks in a killable process whether JSON schemas can be enforced, and caches the verdicts."""

import asyncio
import json
import signal
import sys
from collections import OrderedDict
from typing import NamedTuple

from libs.contracts.errors import QueueFull
from libs.dispatch.ports import Tenancy
from libs.dispatch.waiting import RETRY_AFTER_S, FairSlots
from libs.model.grammar import MAX_CPU_S, MAX_MEMORY_BYTES

MAX_CHECKED = 256
"""The bound on schemas whose verdict is cached."""
MAX_CHECKED_CHARS = 8 * 1024 * 1024
"""The bound on the text of all cached schemas, in the client's form and the grammar library's."""
MAX_CHECKS = 2
"""The bound on concurrent checks, each in a process of its own."""
MAX_WAITING = 32
"""The bound on schemas that wait for a check; more are refused with 429."""
# Wall-clock bound. Other load on the machine may exceed it, so the answer then is 429 and no verdict.
MAX_CHECK_S = 20.0
_OUT_OF_TIME = (-signal.SIGKILL, -signal.SIGXCPU)
MAX_REASON_CHARS = 300


class Verdict(NamedTuple):
    """The result of checking a schema or a rule."""

    fault: str
    """The reason why the schema cannot be enforced; empty if it can."""
    schema: str = "{}"
    """An equal or stricter schema as JSON, in the grammar library's form. Unused for a rule."""


class SchemaCheck:
    """The cached verdicts and running checks, by schema."""

    def __init__(self, tenants: Tenancy | None = None) -> None:
        """`tenants` share the checks; None treats all requests alike."""
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._chars = 0
        full = f"{MAX_CHECKS} schemas are checked at a time, and too many wait: others need room too"
        self.slots = FairSlots(MAX_CHECKS, MAX_WAITING, full, tenants=tenants)
        self._checks: dict[tuple[str, str], asyncio.Lock] = {}
        """The locks of schemas that are being checked or wait for it, by tenant and schema."""

    async def verdict(self, schema: str, tenant: str = "") -> Verdict:
        """Return the verdict on a schema or a rule, given as JSON. Raise QueueFull if too many wait for a check."""
        found = self._verdicts.get(schema)
        if found is None:
            found = await self._check(schema, tenant)
        else:
            self._verdicts.move_to_end(schema)
        return found

    async def _check(self, schema: str, tenant: str) -> Verdict:
        """Check a schema once, however many of the tenant's requests wait for it."""
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
