#!/usr/bin/env bash
# LangChain: a tool call cut by `max_tokens` is an invalid call in a whole answer and a valid one in a streamed answer.
# The stream's JSON is closed where it ends, so the arguments that were not written yet are missing. LangGraph's
# ToolNode runs the call: here it removes a folder without the list of what to keep.
# Met by: agents that stream, against servers with a limit of tokens. `finish_reason` "length" is the only sign.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q langchain-core==1.8.3 langchain-openai==1.7.4 langgraph==1.2.24
cat > "$T/run.py" <<'PY'
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

CUT = json.dumps({"path": "/srv/a", "recursive": True, "keep": ["b", "c"]})[:40]
removed = []


class Handler(BaseHTTPRequestHandler):
    """Answers with a tool call whose arguments end at the limit of tokens, in events if asked for a stream."""

    def log_message(self, *args):
        pass

    def do_POST(self):
        streams = json.loads(self.rfile.read(int(self.headers["content-length"]))).get("stream")
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streams else "application/json")
        self.end_headers()
        if not streams:
            message = {"role": "assistant", "content": None, "tool_calls": [call(CUT)]}
            return self.wfile.write(answer({"message": message, "finish_reason": "length"}, "chat.completion"))
        parts = [CUT[at : at + 8] for at in range(0, len(CUT), 8)]
        deltas = [{"role": "assistant", "tool_calls": [{"index": 0, **call("")}]}]
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in parts]
        for delta in (*deltas, {}):
            choice = {"delta": delta, "finish_reason": None if delta else "length"}
            self.wfile.write(b"data: " + answer(choice, "chat.completion.chunk") + b"\n\n")
        return self.wfile.write(b"data: [DONE]\n\n")


def call(arguments):
    return {"id": "call_1", "type": "function", "function": {"name": "remove", "arguments": arguments}}


def answer(choice, kind):
    fields = {"id": "c", "object": kind, "created": 1, "model": "m", "choices": [{"index": 0, **choice}]}
    return json.dumps(fields).encode()


@tool
def remove(path: str, recursive: bool = False, keep: list[str] = []) -> str:
    """Remove a folder except for some files."""
    removed.append({"path": path, "recursive": recursive, "keep": list(keep)})
    return "removed"


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()


def ask(streaming):
    url = f"http://127.0.0.1:{server.server_port}/v1"
    model = ChatOpenAI(model="m", base_url=url, api_key="none", streaming=streaming).bind_tools([remove])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([remove]))
    graph.add_edge(START, "model")
    graph.add_edge("model", "tools")
    removed.clear()
    said = graph.compile().invoke({"messages": [("user", "tidy up")]})["messages"][1]
    return {
        "valid": [each["args"] for each in said.tool_calls],
        "invalid": [each["args"] for each in said.invalid_tool_calls],
        "executed": list(removed),
        "finish_reason": said.response_metadata["finish_reason"],
    }


whole, stream = ask(False), ask(True)
print("version:    ", *(f"{name} {version(name)}" for name in ("langchain-core", "langchain-openai", "langgraph")))
print("expectation: a call whose arguments are no JSON is in invalid_tool_calls and is not executed")
print("behaviour:   so it is for a whole answer; streamed, it is valid with the arguments that had come, and executed")
print("output:      whole   ", whole)
print("             streamed", stream)
cut = {"path": "/srv/a", "recursive": True}
changed = whole != {"valid": [], "invalid": [CUT], "executed": [], "finish_reason": "length"}
changed |= stream != {"valid": [cut], "invalid": [], "executed": [{**cut, "keep": []}], "finish_reason": "length"}
sys.exit("the behaviour has changed" if changed else 0)
PY
"$T/v/bin/python" "$T/run.py"
