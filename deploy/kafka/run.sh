#!/usr/bin/env bash
# Starts a real Apache Kafka and Redis until Ctrl-C and prints how to use them; see --help.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${FULCRUM_PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
  echo "make kafka: no $python yet: run \`make setup-dev\` first" >&2
  exit 2
fi
exec "$python" -m libs.testing.servers.stores "$@"
