"""Additions to the OpenAPI document that FastAPI cannot derive: errors, and bodies that are read as they arrive."""

from typing import Any, Final

from libs.contracts.batch_terms import ENDPOINTS
from services.gateway.batch.jobs.order import IDEMPOTENCY_HEADER
from services.gateway.batch.lines.upload import PURPOSES

CONTENT_TYPE: Final = "application/octet-stream"
ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"description": "The request's fault."},
    "5XX": {"description": "The suite's fault, or the file store is full."},
}
_FILE: Final = {"type": "string", "format": "binary"}
UPLOAD_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "properties": {
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        "file": _FILE,
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
                    },
                }
            }
        },
    }
}
BATCH_BODY: Final[dict[str, Any]] = {
    "parameters": [{"name": IDEMPOTENCY_HEADER, "in": "header", "schema": {"type": "string"}}],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["endpoint"],
                    "properties": {
                        "input_file_id": {"type": "string"},
                        "endpoint": {"type": "string", "enum": list(ENDPOINTS)},
                        "completion_window": {"type": "string", "default": "24h"},
                        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
                        "priority": {"type": "integer", "default": 0},
                        "input_topic": {"type": "string"},
                        "output_topic": {"type": "string"},
                        "error_topic": {"type": "string"},
                    },
                }
            }
        },
    },
}


def page_parameters(*more: str) -> dict[str, Any]:
    return {
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": "integer" if name == "limit" else "string"}}
            for name in ("after", "limit", *more)
        ]
    }
