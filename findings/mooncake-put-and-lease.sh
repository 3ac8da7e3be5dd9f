#!/usr/bin/env bash
# Mooncake store: put of a key that exists answers 0 and keeps the old value, and asking whether a key exists locks it.
# Met by: KV and weight caches on Mooncake. A refreshed value is never seen, and a monitor that polls is_exist keeps
# its keys from being removed (error -706) for as long as it polls.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q mooncake-transfer-engine-non-cuda==0.3.13.post1
# The wheel links the RDMA libraries even for TCP: fetch Debian's, unpacked beside it and not installed.
mkdir "$T/deb" && chmod 755 "$T" "$T/deb"
(cd "$T/deb" && { apt-get download -qq libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 librdmacm1 2>/dev/null ||
    { apt-get update -qq && apt-get download -qq libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 librdmacm1; }; } &&
    for package in *.deb; do dpkg -x "$package" root; done)
export LD_LIBRARY_PATH="$T/deb/root/usr/lib/x86_64-linux-gnu:$T/deb/root/lib/x86_64-linux-gnu"
cat > "$T/run.py" <<'PY'
import importlib.metadata as metadata, os, pathlib, socket, subprocess, sys, time

from mooncake.store import MooncakeDistributedStore


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


rpc, http = free_port(), free_port()
master = subprocess.Popen(
    [pathlib.Path(sys.executable).with_name("mooncake_master"), f"-rpc_port={rpc}", "-rpc_address=127.0.0.1",
     f"-metrics_port={free_port()}", "-metrics_host=127.0.0.1", "-default_kv_lease_ttl=3000",
     "-enable_http_metadata_server=true", f"-http_metadata_server_port={http}", "-http_metadata_server_host=127.0.0.1"],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
seen = {}
try:
    for port in (rpc, http):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.2)
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", f"http://127.0.0.1:{http}/metadata", 64 << 20, 32 << 20, "tcp", "", f"127.0.0.1:{rpc}") == 0
    seen["put k=old"] = store.put("k", b"old")
    seen["put k=new"] = store.put("k", b"new")
    seen["get k"] = store.get("k")
    seen["upsert k=new"] = store.upsert("k", b"new")
    seen["get k after upsert"] = store.get("k")
    time.sleep(5)
    store.is_exist("k")
    seen["remove k right after is_exist"] = store.remove("k")
    time.sleep(5)
    seen["remove k, 5 s untouched"] = store.remove("k")
    print("version:     mooncake-transfer-engine-non-cuda", metadata.version("mooncake-transfer-engine-non-cuda"), "(lease of 3 s)")
    print("expectation: put replaces the value or answers with an error; is_exist only reads")
    print("behaviour:   put reports success and drops the new value (upsert replaces it); is_exist takes a lease as get does")
    print("output:     ", seen, flush=True)
    assert list(seen.values()) == [0, 0, b"old", 0, b"new", -706, 0], "the behaviour has changed"
except BaseException as error:
    print(repr(error), flush=True)
    code = 1
else:
    code = 0
finally:
    sys.stdout.flush()
    master.terminate()
    master.wait()
os._exit(code)
PY
"$T/v/bin/python" "$T/run.py" 2>/dev/null
