"""`fulcrum workers`: who is there, in which role, and how busy."""

from libs.cli.options import Json, ReadyFile


def workers(ready: ReadyFile = None, json: Json = False) -> None:
    """List the workers of the suite."""
    from libs.cli.tables import show_workers  # noqa: PLC0415 (what only this command needs)

    show_workers(ready, as_json=json)
