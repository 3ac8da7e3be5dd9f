"""A vLLM plugin that reports each engine step to `fulcrum observe`. It needs only the standard library."""

import logging
import os

URL_VARIABLE = "FULCRUM_OBSERVE_URL"


def register() -> None:
    """Prepare this process to report its engine's steps if FULCRUM_OBSERVE_URL is set.

    vLLM calls this in each of its processes. Only a process that runs an engine's loop reports.
    """
    if not os.environ.get(URL_VARIABLE):
        return
    try:
        from .engine import patch  # noqa: PLC0415 - a process that does not report imports nothing

        patch()
    except Exception:  # no error here may keep vLLM from serving
        logging.getLogger("vllm").warning("fulcrum-observe does not report: unknown vLLM", exc_info=True)
