"""What every client asks for. Standard library and pydantic only."""

import json
import sys
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

KEY = "any"
STREAM_TOKENS = 12
MAX_TOKENS = 400
QUESTION = "Which city has the Eiffel Tower, and how many people live there?"
TOOL, TOOL_TEXT = "weather", "Tell the weather of a city."


class City(BaseModel):
    """What is filled, and what the tool takes. Nothing beside it: a small model would go on with fields of its own."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=99_999_999)


def asked() -> tuple[str, str]:
    """(base URL, model) of the command line."""
    return sys.argv[1], sys.argv[2]


def tool() -> dict[str, Any]:
    """The tool in OpenAI's shape."""
    function = {"name": TOOL, "description": TOOL_TEXT, "parameters": City.model_json_schema()}
    return {"type": "function", "function": function}


def tell(*, streamed: str, pieces: int, called: dict[str, Any], filled: City) -> None:
    """Print what came, once it is what was asked for."""
    if pieces < 2 or not streamed:
        raise SystemExit(f"a stream of {pieces} pieces brought {streamed!r}")
    City.model_validate(called)
    print(json.dumps({"streamed": streamed, "pieces": pieces, "called": called, "filled": filled.model_dump()}))
