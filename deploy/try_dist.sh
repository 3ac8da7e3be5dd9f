#!/usr/bin/env bash
# Try the wheels in dist/ as somebody without a clone would: install, start, ask, look at the page, stop.
set -euo pipefail
dist="$(cd "$(dirname "$0")/../dist" && pwd)"
uv="$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/uv"
PORT=8480
READY_S=600
work="$(mktemp -d)"
suite=""
finish() {
  [ -z "$suite" ] || kill -TERM "$suite" 2>/dev/null || true
  [ -z "$suite" ] || wait "$suite" || true
  rm -rf "$work"
}
trap finish EXIT
export FULCRUM_CACHE="$work/cache" PATH="$PATH:$(dirname "$uv")"
cd "$work" # not below a checkout

began=$SECONDS
step() {
  echo "$1: $((SECONDS - began)) s"
  began=$SECONDS
}

"$uv" venv -q --seed "$work/env"
"$uv" pip install -q --python "$work/env/bin/python" --find-links "$dist" \
  --refresh-package fulcrum-serving --refresh-package fulcrum-broker "fulcrum-serving[up]"
# Most people install by pip, which places a wheel's programs by rules of its own.
"$work/env/bin/pip" install -q --no-index --no-deps --force-reinstall --find-links "$dist" fulcrum-serving fulcrum-broker
step "install ($(du -sm "$work/env" | cut -f1) MB)"
for name in libs services; do
  [ ! -e "$work"/env/lib/python3*/site-packages/$name ] || { echo "$name is in site-packages" >&2; exit 1; }
done
said="$("$work/env/bin/fulcrum" --version)"
echo "$said"
for wheel in "$dist"/fulcrum_serving-*-manylinux_*.whl; do
  [ ! -e "$wheel" ] || [[ "$said" == *compiled* ]] || { echo "$wheel was not installed as compiled" >&2; exit 1; }
done

"$work/env/bin/fulcrum" up --gateway-port "$PORT" --json-ready "$work/ready.json" >"$work/out" 2>"$work/err" &
suite=$!
for _ in $(seq "$READY_S"); do
  if grep -q Paris "$work/out" && [ -s "$work/ready.json" ]; then break; fi
  kill -0 "$suite" 2>/dev/null || { cat "$work/out" "$work/err" >&2; exit 1; }
  sleep 1
done
grep Paris "$work/out" || { cat "$work/out" "$work/err" >&2; exit 1; }
step "up and a first answer"

metrics="$("$work/env/bin/python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["metrics"])' "$work/ready.json")"
curl -sf "$metrics/" -o "$work/page" # a pipe into `grep -q` would break under curl once the title is found
grep -q '<title>' "$work/page" || { echo "no page at $metrics" >&2; exit 1; }
"$work/env/bin/fulcrum" status --ready "$work/ready.json"
"$work/env/bin/fulcrum" down --ready "$work/ready.json"
wait "$suite"
suite=""
step "page, status, down"
