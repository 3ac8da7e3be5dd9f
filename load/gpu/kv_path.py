"""`python -m load.gpu.kv_path`: measure the speed at which NIXL reads KV from another process on the same GPU.

One process holds the KV of a prompt, as a prefill worker does. Another reads it block by block in a random order, like
a decode worker through vLLM's connector. Several settings of UCX and sizes of block are measured, with an idle and with
a computing holder. CUDA IPC by torch, on which UCX's cuda_ipc is built, is measured for comparison. The result has each
speed and UCX's transport. It is printed as a table, then as one JSON object in the last line.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.multiprocessing

from load.measure import bench_parser

# (UCX_TLS, UCX_CUDA_IPC_ENABLE_GET_ZCOPY, NIXL's threads). An empty text lets UCX choose. vLLM's connector uses 4
# threads.
SETTINGS: Final = (("", "on", 4), ("", "on", 0), ("", "", 4), ("tcp,cuda_copy", "", 4))
# One layer's K or V of a block takes 32 KiB in Llama-8B, with 16 tokens per block.
BLOCK_KIB: Final = (32, 256, 2048)
REPEATS: Final = 6
# The upper bound of the time for which one cell is repeated.
MOST_S: Final = 3.0
# The upper bound of the time for one setting.
LIMIT_S: Final = 60.0
# The time for a process to end by itself. It writes the rest of UCX's log then.
END_S: Final = 10.0
FILL: Final = 7


def agent_of(name: str, memory: torch.Tensor, threads: int) -> Any:
    """Return a NIXL agent with `memory` registered. UCX's settings are read when NIXL is imported."""
    nixl = import_module("nixl._api")
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(num_threads=threads))
    agent.register_memory(memory)
    return agent


def hold(pipe: Connection, size: int, device: str, threads: int | None) -> None:
    """Hold the memory until a message ends it, and compute between messages that start and stop the load.

    With `threads` None, the memory is shared by CUDA IPC without NIXL.
    """
    memory = torch.full((size,), FILL, dtype=torch.uint8, device=device)
    agent = None if threads is None else agent_of("holder", memory, threads)
    pipe.send(memory if agent is None else (agent.get_agent_metadata(), memory.data_ptr()))
    side = 256 if device == "cpu" else 8192
    factor, word = torch.randn(side, side, dtype=torch.bfloat16, device=device), "rest"
    while word != "end":
        if pipe.poll(0.0 if word == "busy" else 0.05):
            word = pipe.recv()
            pipe.send(word)
        if word == "busy":
            torch.mm(factor, factor).sum().item()  # waits for the device


def read(pipe: Connection, out: Connection, size: int, device: str, threads: int | None) -> None:
    """Read the holder's memory, and send a row for each size of block and state of the holder."""
    memory, shared = torch.zeros(size, dtype=torch.uint8, device=device), pipe.recv()
    agent = None if threads is None else agent_of("reader", memory, threads)
    name = "" if agent is None else agent.add_remote_agent(shared[0])
    for kib in BLOCK_KIB if agent else (size >> 10,):
        for word in ("rest", "busy"):
            memory.zero_()
            pipe.send(word)
            pipe.recv()
            times, end_s = list[float](), time.perf_counter() + MOST_S
            while not times or (len(times) < REPEATS and time.perf_counter() < end_s):
                times.append(read_once(agent, name, memory, shared, kib << 10))
            rate = size / statistics.median(times[1:] or times) / 1e9
            row = {"block_kib": kib, "holder": word, "gb_per_s": round(rate, 2), "times_s": times}
            out.send({**row, "exact": bool((memory == FILL).all())})
    pipe.send("end")
    out.send(None)


def read_once(agent: Any, name: str, memory: torch.Tensor, shared: Any, block: int) -> float:
    """Read everything once, and return the seconds."""
    if agent is None:
        begin_s = time.perf_counter()
        memory.copy_(shared)
        torch.cuda.synchronize()
        return time.perf_counter() - begin_s
    kind, count = "VRAM" if memory.is_cuda else "DRAM", len(memory) // block
    order = torch.randperm(count).tolist()
    sides = [
        agent.prep_xfer_dlist(whose, agent.get_xfer_descs([(base + block * i, block, 0) for i in range(count)], kind))
        for whose, base in (("NIXL_INIT_AGENT", memory.data_ptr()), (name, shared[1]))
    ]
    handle = agent.make_prepped_xfer("READ", sides[0], order, sides[1], order)
    begin_s, state = time.perf_counter(), agent.transfer(handle)
    while state == "PROC":
        time.sleep(20e-6)
        state = agent.check_xfer_state(handle)
    took_s = time.perf_counter() - begin_s
    if state != "DONE":
        raise RuntimeError(f"a transfer ended as {state}")
    for each in (handle, *sides):
        each.release()
    return took_s


def measure(tls: str, threads: int | None, size: int, device: str, get_zcopy: str = "") -> dict[str, Any]:
    """Measure one setting in two new processes."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{folder}/%p.log"}
        for name, value in (("UCX_TLS", tls), ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", get_zcopy)):
            os.environ.pop(name, None)
            if value:
                os.environ[name] = value
        context = torch.multiprocessing.get_context("spawn")
        (near, far), (results, sender) = context.Pipe(), context.Pipe()
        reader = context.Process(target=read, args=(far, sender, size, device, threads), daemon=True)
        holder = context.Process(target=hold, args=(near, size, device, threads), daemon=True)
        for each in (reader, holder):
            each.start()
        rows, end_s = list[dict[str, Any]](), time.monotonic() + LIMIT_S
        while time.monotonic() < end_s and not reader.exitcode and not holder.exitcode:
            if results.poll(0.1):
                row = results.recv()
                if row is None:
                    break
                rows.append(row)
        for each in (reader, holder):  # the reader ends first, since it would log the holder's end as an error
            each.join(END_S)
            each.kill()
            each.join()
        log = Path(folder) / f"{reader.pid}.log"
        by = transports(log.read_text(errors="replace") if log.exists() else "")
    ended = [reader.exitcode, holder.exitcode]
    return {"tls": tls, "get_zcopy": get_zcopy, "threads": threads, "rows": rows, "ended": ended, "transports": by}


def transports(log: str) -> list[str]:
    """Return, from UCX's log, a line with the transport for each range of read sizes."""
    found, reads = list[str](), False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) in (1, 2):  # the head of a table; the second time it has the connection's name
            reads = cells[-1].startswith("remote memory read")
        if reads and cells and cells[0] != "Range":
            found.append(" | ".join(cells))
    return list(dict.fromkeys(found))


def main(options: argparse.Namespace) -> None:
    found = []
    for tls, get_zcopy, threads in (*([("", "", None)] if options.device != "cpu" else []), *SETTINGS):
        one = measure(tls, threads, options.mb << 20, options.device, get_zcopy)
        found.append(one)
        way = "CUDA IPC by torch" if threads is None else f"UCX_TLS={tls} GET_ZCOPY={get_zcopy}, {threads} threads"
        print(way, *one["transports"], f"processes ended: {one['ended']}", sep="\n  ")
        for row in one["rows"]:
            print("  {block_kib:>7} KiB, holder {holder}: {gb_per_s:>8.2f} GB/s, exact: {exact}".format(**row))
    print(json.dumps({"mb": options.mb, "settings": found}))


def parser() -> argparse.ArgumentParser:
    return bench_parser(__doc__, device="cuda:0", mb=(192, "KV of a prompt: 1,500 tokens of Llama-8B"))


if __name__ == "__main__":
    main(parser().parse_args())
