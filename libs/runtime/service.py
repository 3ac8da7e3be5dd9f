"""The life of a service process: settings, logging, signals, one main coroutine, one exit code."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NoReturn

import structlog
import uvloop

from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import masked, masked_values, plain_values
from libs.runtime import status
from libs.runtime.clock import Clock, SystemClock
from libs.runtime.linux import LOOP_SLICE_NS, USUAL_SLICE_NS, ask_slice
from libs.runtime.net.ports import raise_open_files
from libs.runtime.settings import SettingsT, load_settings
from libs.runtime.tasks import TaskOwner


def configure_logging(service: str, *, level: str = "info", log_format: str = "json") -> None:
    """Set up structlog for a process; third-party loggers pass through at warning and above."""
    renderers: tuple[structlog.typing.Processor, ...] = (structlog.processors.JSONRenderer(),)
    if log_format == "console":
        renderers = (_without_controls, structlog.dev.ConsoleRenderer())
    threshold = logging.getLevelName(level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _without_keys,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(stream=sys.stderr, level=max(threshold, logging.WARNING), format="%(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(_mask_record)


def _without_keys(
    _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Mask API keys that clients put into paths, names or messages."""
    return {name: masked_values(value) for name, value in event.items()}


def _without_controls(
    _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape control characters for a terminal, which JSON does by itself. Tracebacks keep their lines."""
    return {name: value if name == "exception" else plain_values(value) for name, value in event.items()}


def _mask_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = masked(record.getMessage()), ()
    return True


log = structlog.get_logger()

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CANNOT_START = 2
# Allocations between collections of the youngest generation. Requests leave hardly any cycles behind, and looking
# for them after every 700 objects cost more than it freed.
GC_YOUNG_OBJECTS = 20_000


@dataclass
class Service(Generic[SettingsT]):
    name: str
    settings: SettingsT
    clock: Clock
    tasks: TaskOwner
    stopping: asyncio.Event
    """Set by SIGTERM, SIGINT or the failure of an owned task; `main` then drains and returns."""


Main = Callable[[Service[SettingsT]], Coroutine[Any, Any, None]]


def run_service(
    name: str, settings_class: type[SettingsT], main: Main[SettingsT], *, failed_s: float | None = None
) -> int:
    """Run `main` until it returns. The exit code tells a failure to start (2) from one while running (1).

    Once an owned task has failed, `main` has `failed_s` to close what it has open; then the process ends as if it
    were killed, even if it hangs. None stands for STOP_GRACE_S.
    """
    try:
        settings = load_settings(settings_class)
    except StartupError as error:
        return _refuse(name, error)
    ask_slice(LOOP_SLICE_NS)  # before there are threads, which inherit it
    raise_open_files()
    configure_logging(name, level=settings.log_level, log_format=settings.log_format)
    collect_seldom()
    try:
        return uvloop.run(_run(name, settings, main, failed_s))
    except StartupError as error:
        return _refuse(name, error)


def collect_seldom() -> None:
    """Exclude all modules loaded so far from later collections, and look through young objects less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG_OBJECTS)


def end_process(exit_code: int) -> NoReturn:
    """End immediately, after flushing the data that others need.

    The interpreter would first tear down all loaded modules. For torch and vLLM that takes a second, while others
    wait for the worker to end before they start it again.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


async def _run(name: str, settings: SettingsT, main: Main[SettingsT], failed_s: float | None) -> int:
    def failed(_error: BaseException) -> None:
        stopping.set()
        if failed_s is not None:
            # A thread: the loop itself may hang. It flushes nothing, which may hang too.
            end = threading.Timer(failed_s, os._exit, (EXIT_FAILED,))
            end.daemon = True
            end.start()

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(
        ThreadPoolExecutor(thread_name_prefix="asyncio", initializer=ask_slice, initargs=(USUAL_SLICE_NS,))
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    tasks = TaskOwner(on_failure=failed)
    service = Service(name, settings, SystemClock(), tasks, stopping)
    work = loop.create_task(main(service), name=f"{name} main")
    stop = loop.create_task(_interrupt_start(stopping, work), name="interrupt start")
    try:
        await work
    except asyncio.CancelledError:
        log.info("stopped while starting")
    finally:
        stop.cancel()
        await tasks.close()
    return EXIT_FAILED if tasks.error else EXIT_OK


async def _interrupt_start(stopping: asyncio.Event, work: "asyncio.Task[None]") -> None:
    # A `main` that does not watch `stopping` yet, for example while loading a model, is cancelled after a grace
    # period.
    await stopping.wait()
    await asyncio.sleep(STOP_GRACE_S)
    work.cancel()


# Bound on everything a service does after a stop signal; services' own drains are shorter.
STOP_GRACE_S = 30.0


def _refuse(name: str, error: StartupError) -> int:
    status.emit("failed", error=error.message)
    print(f"fulcrum {name}: {error.message}", file=sys.stderr)
    return EXIT_CANNOT_START
