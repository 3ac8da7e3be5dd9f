"""`python -m libs.model.instances`: check the pairs of text and JSON schema on stdin.

It prints a list with true, false, or null for a schema whose patterns or references cannot be evaluated. A text that is
not JSON satisfies no schema.

It runs in a separate process because a client's patterns may take any amount of time.
"""

import json
import resource
import sys
from collections.abc import Mapping
from typing import Any

from libs.model.grammar import MAX_CPU_S, MAX_MEMORY_BYTES


def satisfies(text: str, schema: Mapping[str, Any]) -> bool | None:
    """Return whether a text is an instance of the schema; None if the schema cannot be evaluated."""
    import jsonschema  # noqa: PLC0415 (a third of a second that its caller's process may not need)
    from referencing import Registry  # noqa: PLC0415

    validators = {
        "draft-04": jsonschema.Draft4Validator,
        "draft-05": jsonschema.Draft4Validator,
        "draft-06": jsonschema.Draft6Validator,
        "draft-07": jsonschema.Draft7Validator,
        "2019-09": jsonschema.Draft201909Validator,
    }
    draft = str(schema.get("$schema", ""))
    validator = next((found for name, found in validators.items() if name in draft), jsonschema.Draft202012Validator)
    try:
        instance = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    # Without the draft's address, of which the library may not know this spelling.
    bare = {key: value for key, value in schema.items() if key != "$schema"}
    try:
        # The empty registry keeps the library from fetching references.
        return bool(validator(bare, registry=Registry()).is_valid(instance))
    except Exception:  # the library has no class for errors about unexpected patterns and values
        return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def main() -> None:
    # The kernel ends the process at these limits of time and memory.
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    json.dump([satisfies(text, schema) for text, schema in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
