"""A connection to a Kubernetes API server: its address, and calls with a timeout and typed failures."""

from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config.config_exception import ConfigException

from libs.actuators.port import ActuatorDown

CALL_S: Final = 2.0
ACCOUNT_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_NAMESPACE: Final = "default"
T = TypeVar("T")


class ApiRefusal(ActuatorDown):
    """A response of the server that refuses the call."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NoApiServer(ActuatorDown):
    """A configuration that does not name an API server."""


class ScaledMeanwhile(ApiRefusal):
    """A conflict, because somebody else has scaled the Deployment in the meantime."""


class TooOld(ApiRefusal):
    """A version whose changes the server no longer keeps; the pods must be listed again."""


class KubeClient:
    """One client of the API server, created at the first call.

    `kubeconfig` is a file; if empty, the service account of this pod is used. Every method raises ActuatorDown.
    """

    def __init__(self, kubeconfig: str) -> None:
        self._kubeconfig = kubeconfig
        self._client: client.ApiClient | None = None

    async def connected(self) -> client.ApiClient:
        if self._client is None:
            with failures():
                settings = client.Configuration()
                await self._configure(settings)
                self._client = client.ApiClient(settings)
        return self._client

    async def call(self, call: Callable[[], Awaitable[Any]], answer: type[T], *, gone: bool = False) -> T:
        """Call the server and decode the response. If `gone`, a missing object is returned as an empty one."""
        with failures():
            response = await call()
            body = await response.read()
            if gone and response.status == HTTPStatus.NOT_FOUND:
                body = b'{"metadata": {}}'
            elif response.status >= HTTPStatus.BAD_REQUEST:  # the client checks only responses that it reads itself
                raise ApiException(status=response.status, reason=said(body) or response.reason)
            return msgspec.json.decode(body, type=answer)

    async def close(self) -> None:
        connected, self._client = self._client, None
        if connected is not None:
            await connected.close()

    async def _configure(self, settings: client.Configuration) -> None:
        if self._kubeconfig:
            await config.load_kube_config(self._kubeconfig, client_configuration=settings)
        else:
            config.load_incluster_config(client_configuration=settings)


class ShellClient(KubeClient):
    """A client that finds its server like kubectl: outside a pod by KUBECONFIG or ~/.kube/config."""

    namespace = DEFAULT_NAMESPACE
    """The namespace of the configuration, once connected."""

    async def _configure(self, settings: client.Configuration) -> None:
        if not self._kubeconfig:
            try:
                config.load_incluster_config(client_configuration=settings)
            except ConfigException:
                pass  # not in a pod
            else:
                self.namespace = _account_namespace()
                return
        file = self._kubeconfig or None
        try:
            await config.load_kube_config(file, client_configuration=settings)
            _, context = config.list_kube_config_contexts(file)
        except ConfigException:
            raise
        except Exception as error:  # a file that is not YAML, or of another form, raises arbitrary errors in the reader
            raise ConfigException(f"the kubeconfig cannot be read: {error}") from None
        self.namespace = context["context"].get("namespace") or DEFAULT_NAMESPACE


def _account_namespace() -> str:
    try:
        return ACCOUNT_NAMESPACE.read_text().strip() or DEFAULT_NAMESPACE
    except OSError:
        return DEFAULT_NAMESPACE


RAW: Final[dict[str, Any]] = {"_preload_content": False, "_request_timeout": CALL_S}


class WatchEvent(msgspec.Struct, frozen=True):
    """A change of one object."""

    type: str
    object: msgspec.Raw


class _Refusal(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class failures:  # noqa: N801 - reads as a statement
    """A context that turns failures into ActuatorDown, ScaledMeanwhile or TooOld."""

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ApiException):
            if error.status == HTTPStatus.CONFLICT:
                raise ScaledMeanwhile(str(error.reason), error.status) from error
            if error.status == HTTPStatus.GONE:
                raise TooOld(str(error.reason), error.status) from error
            raise ApiRefusal(f"Kubernetes refuses: {error.status} {error.reason}", error.status) from error
        if isinstance(error, ConfigException):
            raise NoApiServer(f"no configuration for a Kubernetes API server was found: {error}") from error
        if isinstance(error, aiohttp.ClientError | TimeoutError | OSError):
            raise ActuatorDown(f"Kubernetes' API server does not answer: {error!r}") from error
        if isinstance(error, msgspec.MsgspecError):
            raise ActuatorDown(f"Kubernetes' API server sent an invalid answer: {error}") from error


def said(body: bytes) -> str:
    """Return the message of a refusing response, or an empty string."""
    try:
        return str(msgspec.json.decode(body)["message"])[:300]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return ""


async def watch_events(response: Any) -> AsyncIterator[WatchEvent]:
    """Yield the events of a watch. Raise ApiException for an event that is an error."""
    async for line in watch_lines(response):
        event = msgspec.json.decode(line, type=WatchEvent)
        if event.type == "ERROR":
            refusal = msgspec.json.decode(event.object, type=_Refusal)
            raise ApiException(status=refusal.code, reason=refusal.message)
        yield event


async def watch_lines(response: Any) -> AsyncIterator[bytes]:
    """Yield the lines of a watch. A line too long for aiohttp is refused as outdated, since a list also contains its
    object.
    """
    try:
        async for line in response.content:
            yield line
    except (ValueError, HttpProcessingError) as error:  # the second since aiohttp 3.14, where it is not a ClientError
        raise ApiException(status=HTTPStatus.GONE, reason=f"an event is too long: {error}") from None
