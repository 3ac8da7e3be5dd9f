"""Processes that do one thing and end, such as converting a model: run under the launcher, their progress shown."""

from libs.contracts.errors import StartupError
from libs.launch.port import ChildSpec, Launcher
from libs.launch.report import Reporter

GRACE_S = 2.0


async def run_helper(launcher: Launcher, reporter: Reporter, name: str, command: tuple[str, ...]) -> str:
    """The path that the helper reports, if any. Raises StartupError with its own words when it fails."""
    reporter.progress(name, "starting", 0.0)
    child = await launcher.start(ChildSpec(name, command, {}))
    path = error = ""
    try:
        async for line in child.statuses():
            if line.event == "progress":
                reporter.progress(name, line.stage, line.fraction)
            path, error = line.path or path, line.error or error
        code = await child.wait()
    finally:
        await child.stop(GRACE_S)
    if code:
        reason = error or launcher.last_words(name) or f"exit code {code}"
        raise StartupError(f"{reason} (log: {launcher.log_of(name)})")
    reporter.ready(name, "")
    return path
