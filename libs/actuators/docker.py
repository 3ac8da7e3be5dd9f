"""The actuator for a Docker engine, whose workers are standby containers modelled on those of a Compose service.

They carry the Compose project's labels, so that `docker compose down` removes them as well. The engine itself
restarts containers that die.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeVar

import docker
import structlog
from docker.errors import APIError, DockerException, NotFound
from requests.exceptions import RequestException

from libs.actuators.port import ActuatorDown, Started, to_end
from libs.runtime.tasks import end

log = structlog.get_logger()

SPARE: Final = "dev.fulcrum.spare"
"""The label of containers started by this actuator, whose value is the worker's name."""
OF_SERVICE: Final = "dev.fulcrum.spare-of"
SERVICE: Final = "com.docker.compose.service"
NUMBER: Final = "com.docker.compose.container-number"
TIMEOUT_S: Final = 10
STOP_S: Final = 30
"""The time that a worker has to finish its sequences."""
ENDED: Final = ("exited", "dead", "removing")
T = TypeVar("T")


class DockerActuator:
    """An actuator whose blocking calls of Docker's SDK run on threads, one at a time."""

    kind = "docker"

    def __init__(self, *, service: str, most: int, engine_url: str = "", project: str = "") -> None:
        """Create the actuator. `project` is the Compose project, needed if the engine has several with such a
        service.
        """
        self._service = service
        self._most = most
        self._engine_url = engine_url
        self._project = project
        self._client: Any = None
        self._lock = asyncio.Lock()
        self._ending: dict[str, asyncio.Task[None]] = {}
        """Tasks of workers that are finishing their sequences, at most one per worker."""

    async def look(self) -> Started:
        return await self._call(self._look)

    async def have(self, count: int, *, first_to_end: Sequence[str] = ()) -> None:
        """Create and end containers. A call that is interrupted halfway is completed by the next one."""
        spares = await self._call(self._spares)
        staying = [name for name in spares if name not in self._ending]
        for name in to_end(staying, count, first_to_end):
            self._ending[name] = asyncio.create_task(self._end_by(name, spares[name]), name=f"end {name}")
        wanted = min(count, self._most) - len(staying)
        if wanted > 0:
            await self._call(lambda: self._start_some(wanted, spares))

    async def show(self, roles: Mapping[str, str]) -> None:
        # The labels of a container are fixed when it is created.
        ...

    async def close(self) -> None:
        await end(*self._ending.values())
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(client.close)

    async def _call(self, work: Callable[[], T]) -> T:
        async with self._lock:
            try:
                return await asyncio.to_thread(work)
            except (DockerException, RequestException, OSError, KeyError) as error:
                raise ActuatorDown(f"Docker's engine: {error}") from error

    def _engine(self) -> Any:
        if self._client is None:
            where = {"base_url": self._engine_url} if self._engine_url else {}
            self._client = (
                docker.DockerClient(**where, timeout=TIMEOUT_S) if where else docker.from_env(timeout=TIMEOUT_S)
            )
        return self._client

    def _look(self) -> Started:
        environment = dict(each.split("=", 1) for each in self._template()["Config"]["Env"] or () if "=" in each)
        return Started(tuple(self._spares()), self._most, environment.get("FULCRUM_WORKER_MODEL", ""))

    async def _end_by(self, name: str, container: Any) -> None:
        try:
            await asyncio.to_thread(self._end, container)
        except (DockerException, RequestException, OSError) as error:
            log.warning("a worker's container could not be stopped: retrying", worker=name, error=str(error))
        finally:
            del self._ending[name]

    def _start_some(self, wanted: int, spares: dict[str, Any]) -> None:
        template = self._template()
        free = (name for number in range(1, self._most + 1) if (name := f"spare-{number}") not in spares)
        for name in list(free)[:wanted]:
            self._start(name, template)

    def _spares(self) -> dict[str, Any]:
        """Return containers by worker name, oldest first, and remove those that have ended."""
        filters = {"label": [f"{OF_SERVICE}={self._service}", *self._of_project()]}
        found = {}
        for container in reversed(self._engine().containers.list(all=True, ignore_removed=True, filters=filters)):
            if container.status in ENDED:
                _remove(container)
            else:
                found[container.labels[SPARE]] = container
        return found

    def _end(self, container: Any) -> None:
        try:
            container.stop(timeout=STOP_S)
        except NotFound:
            return
        _remove(container)

    def _template(self) -> dict[str, Any]:
        """Return the engine's description of a container of the service that Compose itself started."""
        filters = {"label": [f"{SERVICE}={self._service}", *self._of_project()]}
        for container in self._engine().containers.list(ignore_removed=True, filters=filters):
            if SPARE not in container.labels:
                attributes: dict[str, Any] = container.attrs
                return attributes
        raise KeyError(f"no container of service {self._service!r} runs that could serve as a template")

    def _of_project(self) -> list[str]:
        return [f"com.docker.compose.project={self._project}"] if self._project else []

    def _start(self, name: str, template: dict[str, Any]) -> None:
        config, host = template["Config"], dict(template["HostConfig"])
        host.pop("PortBindings", None)
        labels = {key: value for key, value in (config["Labels"] or {}).items() if key != NUMBER}
        labels |= {SPARE: name, OF_SERVICE: self._service}
        kept = [
            each for each in config["Env"] or () if not each.startswith(("FULCRUM_WORKER_ID=", "FULCRUM_WORKER_ROLE="))
        ]
        networks = template["NetworkSettings"]["Networks"]
        api = self._engine().api
        made = api.create_container(
            image=config["Image"],
            command=config["Cmd"],
            entrypoint=config["Entrypoint"],
            environment=[*kept, f"FULCRUM_WORKER_ID={name}", "FULCRUM_WORKER_ROLE=standby"],
            labels=labels,
            user=config["User"],
            working_dir=config["WorkingDir"],
            stop_signal=config.get("StopSignal"),
            healthcheck=config.get("Healthcheck"),
            host_config=host,
            networking_config={"EndpointsConfig": {network: {} for network in networks}},
        )
        api.start(made["Id"])


def _remove(container: Any) -> None:
    try:
        container.remove(force=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != HTTPStatus.CONFLICT:  # another process is removing it
            raise
