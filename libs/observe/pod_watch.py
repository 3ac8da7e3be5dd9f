"""The watch that follows the servers of a Kubernetes namespace. Needs the extra `kubernetes`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Final

import msgspec
import structlog
from kubernetes_asyncio import client
from kubernetes_asyncio.client.exceptions import ApiException

from libs.actuators.kubernetes_client import (
    CALL_S,
    RAW,
    ApiRefusal,
    NoApiServer,
    ShellClient,
    TooOld,
    WatchEvent,
    failures,
    said,
    watch_events,
)
from libs.actuators.port import ActuatorDown
from libs.contracts.errors import InvalidRequest
from libs.contracts.foreign_text import plain
from libs.observe.fleet import MOST_SERVERS, ObservedTarget
from libs.observe.pods import ObservedPods, PodList, PodQuery, ServerPod
from libs.policy.verdict.state import PodLabel

log = structlog.get_logger()

LIST_S: Final = 10.0
"""The timeout of a list, which has megabytes for a thousand pods."""
WATCH_S: Final = 20
"""The time after which a watch ends by itself and is opened again."""
# A server that has not ended the watch by then counts as unreachable.
SILENCE_S: Final = WATCH_S + 5.0
MOST_PODS: Final = 4_096
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 8.0
PERMISSIONS: Final = "deploy/observe/kubernetes.yaml"
_HELPLESS: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
"""Statuses that retries cannot resolve."""


class PodFollower:
    """The servers of a query, current while `follow` runs."""

    def __init__(self, query: PodQuery, kubeconfig: str = "") -> None:
        """Create the follower. `kubeconfig` is a file; if empty, the account of this pod is used, or outside a pod
        kubectl's default.
        """
        self._query = query
        self._client = ShellClient(kubeconfig)
        self._pods = ObservedPods(query)
        self._version = ""
        """The version to watch from; empty if the pods must be listed."""
        self._failure = ""

    @property
    def namespace(self) -> str:
        return self._query.namespace or self._client.namespace

    @property
    def targets(self) -> list[ObservedTarget]:
        return self._pods.targets()

    @property
    def label(self) -> PodLabel:
        return PodLabel(self.namespace, self._query.role_label)

    @property
    def trouble(self) -> str:
        """The reason why servers may be missing from the list, or the list out of date; empty if there is no such
        reason.
        """
        where = f"{self._query.selector!r} in namespace {self.namespace!r}"
        if self._failure:
            return f"the list of pods is that of before: {self._failure}"
        if self._pods.left_out:
            return f"{self._pods.left_out} servers are left out: one process observes {MOST_SERVERS} at most"
        if not self.targets:
            if self._pods.matching:
                return f"none of the pods ({self._pods.matching}) that match {where} is ready: waiting for pods"
            return f"no pod matches {where}: waiting for pods"
        return ""

    async def begin(self) -> None:
        """List the pods once. Raise InvalidRequest for an error that retries cannot resolve."""
        try:
            await self._list()
        except NoApiServer as error:
            raise InvalidRequest(str(error)) from None
        except ActuatorDown as error:
            self._failure = self._explained(error)
            if isinstance(error, ApiRefusal) and error.status in _HELPLESS:
                raise InvalidRequest(self._failure) from None

    async def follow(self, changed: Callable[[], None]) -> None:
        """Watch until cancelled, and call `changed` after each change of `targets` or `trouble`.

        While the server is away, the last list stays in use and requests are retried at growing intervals.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if not self._version:
                    await self._list()
                    changed()
                async for _ in self._changes():
                    if self._failure:
                        self._failure = ""
                        log.info("pods are watched again", namespace=self.namespace)
                    pause_s = FIRST_PAUSE_S
                    changed()
                await asyncio.sleep(FIRST_PAUSE_S)
            except TooOld:
                self._version = ""
                await asyncio.sleep(FIRST_PAUSE_S)
            except ActuatorDown as error:
                # If the server hangs, a list fails sooner than a watch. A server restored to an older state lacks the
                # known version.
                self._version = ""
                if not self._failure:
                    log.warning("pods cannot be watched: retrying", error=plain(str(error)))
                self._failure = self._explained(error)
                changed()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def close(self) -> None:
        await self._client.close()

    async def _list(self) -> None:
        core = client.CoreV1Api(await self._client.connected())
        raw = {**RAW, "_request_timeout": LIST_S}
        found = await self._client.call(
            lambda: core.list_namespaced_pod(
                self.namespace, label_selector=self._query.selector, limit=MOST_PODS, **raw
            ),
            PodList,
        )
        if found.metadata.more:
            raise ActuatorDown(f"over {MOST_PODS} pods match {self._query.selector!r}")
        self._pods.replace(found.items)
        self._version = found.metadata.resource_version

    async def _changes(self) -> AsyncIterator[None]:
        """Apply changes for up to WATCH_S. Yield once when the watch begins, and after each change."""
        core = client.CoreV1Api(await self._client.connected())
        with failures():
            async with asyncio.timeout(CALL_S):  # the response's headers arrive at once
                response = await core.list_namespaced_pod(
                    self.namespace, label_selector=self._query.selector, resource_version=self._version, watch=True,
                    allow_watch_bookmarks=True, timeout_seconds=WATCH_S, **{**RAW, "_request_timeout": SILENCE_S},
                )  # fmt: skip
            try:
                if response.status >= HTTPStatus.BAD_REQUEST:
                    raise ApiException(status=response.status, reason=said(await response.read()))
                yield
                async for event in watch_events(response):
                    self._take(event)
                    yield
            finally:
                response.close()

    def _take(self, event: WatchEvent) -> None:
        pod = msgspec.json.decode(event.object, type=ServerPod)
        self._version = pod.metadata.resource_version
        if event.type == "DELETED":
            self._pods.remove(pod.metadata.name)
        elif event.type != "BOOKMARK":
            self._pods.put(pod)

    def _explained(self, error: ActuatorDown) -> str:
        if isinstance(error, ApiRefusal) and error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            needed = f"verbs list and watch on pods in namespace {self.namespace!r}"
            return f"{error}. It needs the {needed}, which the Role of {PERMISSIONS} gives"
        if isinstance(error, ApiRefusal) and error.status == HTTPStatus.BAD_REQUEST:
            return f"{error} (the label selector is {self._query.selector!r})"
        return str(error)
