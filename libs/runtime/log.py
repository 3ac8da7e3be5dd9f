"""Logs: structlog to stderr, one event a line, with the service's name. stdout belongs to status lines and answers."""

import logging
import sys

import structlog


def configure_logging(service: str, *, level: str = "info", log_format: str = "json") -> None:
    """Set up structlog for a process; third-party loggers pass through at warning and above."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if log_format == "console" else structlog.processors.JSONRenderer()
    )
    threshold = logging.getLevelName(level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(stream=sys.stderr, level=max(threshold, logging.WARNING), format="%(name)s: %(message)s")
