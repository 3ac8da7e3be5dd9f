"""`python -m load.clients`: runs every client that can be had here against suites on the sim and torch engines. Exit
code 1 if one of them got no answer.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from load.clients.asking import AGENT_CLIENTS, CLIENTS, ask, suite_on


def ask_all(engine: str, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return by client (answered, failed or not here; its last output), against a suite on this engine."""
    results: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        with suite_on(engine, home) as (suite, model):
            for client in names:
                print(f"{client} on {engine} …", file=sys.stderr, flush=True)
                results[client] = ask(client, suite.gateway, model, home)
                print(f"  {results[client][0]}: {results[client][1][:200]}", file=sys.stderr, flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    every = [*CLIENTS, *AGENT_CLIENTS]
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="CLIENT")
    parser.add_argument("--engine", nargs="+", choices=["sim", "torch"], default=["sim", "torch"])
    asked = parser.parse_args()
    table = Table("engine", "client", "outcome", "what it said last")
    outcomes: dict[str, dict[str, str]] = {}
    for engine in asked.engine:
        names = [name for name in asked.only if engine == "sim" or name in AGENT_CLIENTS]
        results = ask_all(engine, names)
        for name, (outcome, said) in results.items():
            table.add_row(engine, name, outcome, said[:160])
        outcomes[engine] = {name: outcome for name, (outcome, _) in results.items()}
    Console().print(table)
    print(json.dumps(outcomes))
    return 1 if any("failed" in each.values() for each in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
