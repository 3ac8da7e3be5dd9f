"""The command `fulcrum chat`: a question, its streamed answer, and the workers that served it."""

from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile


def chat(
    prompt: Annotated[str, typer.Argument(help="What to ask.", show_default=False)],
    *,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens to generate.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, metavar="T", help="0 is greedy. Default: the model's own.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="M", help="Name from /v1/models. Default: the suite's first model.")
    ] = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Ask the suite a question and stream the answer."""
    import asyncio  # noqa: PLC0415 (what only this command needs)

    from libs.cli.chat.conversation import answer_once  # noqa: PLC0415

    asyncio.run(answer_once(prompt, max_tokens, temperature, model, ready_file=ready, as_json=json))
