"""The command `fulcrum doctor`: checks whether this machine can run a suite and says what to do if not."""

from typing import Annotated

import typer

from libs.cli.options import Json

ENGINES = ("sim", "torch", "vllm")
MARKS = {"ok": ("✓", "green"), "slower": ("!", "yellow"), "missing": ("✗", "red")}


def doctor(
    engine: Annotated[str, typer.Option(help="Engine that workers would run: sim, torch or vllm.")] = "torch",
    *,
    json: Json = False,
) -> None:
    """Check this machine: driver, CUDA, compilers, shared memory, RDMA, packages. Exit code 1 if the engine would not
    start.
    """
    import os  # noqa: PLC0415 (what only this command needs)

    import msgspec  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from libs.contracts.errors import InvalidRequest  # noqa: PLC0415
    from libs.launch.doctor.findings import Level, findings  # noqa: PLC0415
    from libs.launch.doctor.machine import look  # noqa: PLC0415

    if engine not in ENGINES:
        raise InvalidRequest(f"--engine {engine!r} is not one of {', '.join(ENGINES)}", param="engine")
    found = findings(look(os.environ), engine)
    starts = all(each.level is not Level.MISSING for each in found)
    if json:
        print(msgspec.json.encode({"engine": engine, "starts": starts, "findings": found}).decode())
        raise typer.Exit(0 if starts else 1)
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for each in found:
        mark, colour = MARKS[each.level]
        says = f"{escape(each.says)}\n[bold]{escape(each.do)}[/]" if each.do else escape(each.says)
        shown.add_row(f"[{colour}]{mark}[/]", each.what, says)
    console = Console(highlight=False)
    console.print(shown)
    console.print(f"\nIt starts here: fulcrum up --engine {engine}" if starts else "\nIt does not start here yet.")
    raise typer.Exit(0 if starts else 1)
