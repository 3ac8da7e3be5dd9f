#!/usr/bin/env bash
# NIXL: loading an agent's metadata again adds what is new and drops nothing, and a restarted agent is refused.
# Met by: whoever frees or resizes KV memory, or restarts a worker, and tells its peers by sending metadata again. A
# peer still reads blocks that their owner has deregistered, ends DONE, and has the bytes of whatever is there now.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
# The rest of the list, torch among it, is not needed for host memory.
"$T/v/bin/python" -m pip install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1 numpy==2.4.6
cat > "$T/run.py" <<'PY'
import multiprocessing, time
from importlib.metadata import version

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

SIZE, WAIT_S = 1 << 20, 10.0


def agent(name):
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def place(buffer):
    return [(buffer.ctypes.data, buffer.nbytes, 0, "")]


def owner(pipe):
    """Owns two buffers full of 7 and 8, of which the first is registered from the start."""
    own, first, second = agent("owner"), np.full(SIZE, 7, np.uint8), np.full(SIZE, 8, np.uint8)
    registered = own.register_memory(place(first), "DRAM")
    pipe.send((own.get_agent_metadata(), first.ctypes.data))
    while (asked := pipe.recv()) != "end":
        if asked == "register the second":
            own.register_memory(place(second), "DRAM")
        if asked == "deregister the first":
            own.deregister_memory(registered)
            first[:] = 5  # whoever owns the memory uses it for something else
        pipe.send((own.get_agent_metadata(), second.ctypes.data))


def start():
    mine, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=owner, args=(other,), daemon=True)
    process.start()
    return process, mine, *mine.recv()


def main():
    reader, buffer = agent("reader"), np.zeros(SIZE, np.uint8)
    reader.register_memory(place(buffer), "DRAM")

    def read(address):
        here = reader.get_xfer_descs([(buffer.ctypes.data, SIZE, 0)], "DRAM")
        there = reader.get_xfer_descs([(address, SIZE, 0)], "DRAM")
        try:
            transfer = reader.initialize_xfer("READ", here, there, "owner", b"")
        except Exception as error:
            return str(error)
        state, until = reader.transfer(transfer), time.monotonic() + WAIT_S
        while state == "PROC" and time.monotonic() < until:
            state = reader.check_xfer_state(transfer)
        return f"{state} {buffer[0]}"

    def load(metadata):
        try:
            reader.add_remote_agent(metadata)
            return "loaded"
        except Exception as error:
            return str(error)

    def ask(pipe, what):
        pipe.send(what)
        return pipe.recv()

    process, pipe, metadata, first = start()
    assert (load(metadata), read(first)) == ("loaded", "DONE 7")
    metadata, second = ask(pipe, "register the second")
    before = read(second)
    print("a second buffer, before and after its owner's metadata was loaded again:", before, "|", load(metadata), read(second))
    metadata, _ = ask(pipe, "deregister the first")
    gone = read(first), load(metadata), read(first)
    print("the first buffer, deregistered and holding 5 now:", *gone)
    process.kill()
    process.join()
    process, pipe, metadata, first = start()
    again = load(metadata), read(first)
    print("an agent of the same name after a restart:", *again)
    reader.remove_remote_agent("owner")
    after = load(metadata), read(first)
    print("the same once the old one was removed:", *after)
    pipe.send("end")
    print("nixl", version("nixl"))
    print("expected: the newest metadata counts, so a deregistered buffer is NOT_FOUND and a restarted agent replaces the old")
    assert before == "NIXL_ERR_NOT_FOUND"
    assert gone == ("DONE 5", "loaded", "DONE 5"), gone
    assert again == ("NIXL_ERR_NOT_ALLOWED", "NIXL_ERR_NOT_FOUND"), again
    assert after == ("loaded", "DONE 7"), after


if __name__ == "__main__":
    main()
PY
NIXL_LOG_LEVEL=FATAL "$T/v/bin/python" "$T/run.py"
echo "behaviour unchanged: metadata that is loaded again adds, and never removes or replaces"
