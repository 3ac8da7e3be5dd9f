#!/usr/bin/env bash
# huggingface_hub: without the hub, snapshot_download returns a folder that lacks most of the model, if single files
# were all that was fetched before. Only a snapshot that was begun by snapshot_download of release 2 is checked.
# Met by: servers that start offline from a cache in a volume in which a gateway has fetched the tokenizer or config of
# a model, file by file. The call succeeds, with patterns that match no file too, and loading the weights fails later.
# One would expect IncompleteSnapshotError, which the reference names, or LocalEntryNotFoundError.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q huggingface_hub==2.4.0
cat > "$T/run.py" <<'PY'
import json, os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

FILES = {"config.json": b"{}"} | {f"model-0000{number}-of-00002.safetensors": b"weights" for number in (1, 2)}
COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, whose second file of weights fails."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        if name in FILES:
            if name.startswith("model-00002"):
                return self.send_error(403)
            self.send_response(200)
            self.send_header("x-repo-commit", COMMIT)
            self.send_header("etag", f'"{name}"')
            self.send_header("content-length", str(len(FILES[name])))
            self.end_headers()
            return None if self.command == "HEAD" else self.wfile.write(FILES[name])
        if "/tree/" in self.path:
            body = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in FILES.items()]
        else:
            body = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        return None if self.command == "HEAD" else self.wfile.write(text)

    do_HEAD = do_GET


hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=hub.serve_forever, daemon=True).start()
os.environ |= {
    "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_CACHE": str(Path(sys.argv[1]) / "cache"),
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1",
}
from huggingface_hub import hf_hub_download, snapshot_download


def attempt(function, *arguments, **options):
    try:
        path = Path(function(*arguments, **options))
    except Exception as error:
        return type(error).__name__
    return sorted(each.name for each in path.iterdir()) if path.is_dir() else path.name


def offline(title):
    seen[title] = attempt(snapshot_download, "org/name", local_files_only=True)
    seen[f"{title}, weights only"] = attempt(
        snapshot_download, "org/name", local_files_only=True, allow_patterns="*.safetensors"
    )


seen = {}
assert attempt(hf_hub_download, "org/name", "config.json") == "config.json"
offline("after a file")
assert attempt(snapshot_download, "org/name", max_workers=1) == "LocalEntryNotFoundError"
offline("after an unfinished snapshot")
print("version:     huggingface_hub", version("huggingface_hub"))
print("expectation: an error, since files of the model are not in the cache")
print("behaviour:   so it is after an unfinished snapshot; after a single file, the folder with that file")
for name, found in seen.items():
    print(f"output:      {name}: {found}")
changed = list(seen.values()) != [["config.json"]] * 2 + ["IncompleteSnapshotError"] * 2
if changed:
    print("the behaviour has changed")  # to stdout, since stderr is dropped
    sys.exit(1)
PY
"$T/v/bin/python" "$T/run.py" "$T" 2>/dev/null
