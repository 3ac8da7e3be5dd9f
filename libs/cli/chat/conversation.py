import json
from pathlib import Path
from typing import Any

from libs.cli.chat.ask import ChatAnswer, ask
from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json
from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain


async def answer_once(
    prompt: str,
    max_tokens: int,
    temperature: float | None,
    model: str | None,
    *,
    ready_file: Path | None,
    as_json: bool,
) -> None:
    """Ask a question and print the answer. Raises StartupError."""
    suite = find_suite(ready_file)
    body: dict[str, Any] = {
        "model": model or suite.model or _first_model(suite.gateway),
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
    }
    if temperature is not None:
        body["temperature"] = temperature
    answer = ChatAnswer()
    async for piece in ask(suite.gateway, body, answer):
        if not as_json:
            print(plain(piece, lines=True), end="", flush=True)
    if as_json:
        print(json.dumps(answer.to_json()))
        return
    print(flush=True)
    make_console(stderr=True, soft_wrap=True).print(plain(answer.served_by()), style="dim")


def _first_model(gateway: str) -> str:
    models = get_json(gateway, "/v1/models", exact=True)["data"]
    if not models:
        raise StartupError(f"{gateway} serves no model")
    return str(models[0]["id"])
