"""`python -m libs.model.instances`: check texts against JSON schemas, read from stdin as a list of pairs.

It prints a list with true, false, or null where the schema's own patterns or references cannot be followed. A text that
is not JSON satisfies no schema.

It runs in a separate process, since a client's patterns may take any time.
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
    # Without the address, whose spelling may be one that the library does not know.
    bare = {key: value for key, value in schema.items() if key != "$schema"}
    try:
        # An empty registry fetches nothing.
        return bool(validator(bare, registry=Registry()).is_valid(instance))
    except Exception:  # the library has no error class for unexpected patterns and values
        return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def main() -> None:
    # Beyond these limits of time and memory the kernel ends the process.
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    json.dump([satisfies(text, schema) for text, schema in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
