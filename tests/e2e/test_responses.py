"""Tests of /v1/responses with OpenAI's client, over a worker with scripted answers."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from libs.model.info import load_model_info
from libs.runtime.clock import SystemClock
from libs.runtime.http import bind
from libs.runtime.tasks import TaskOwner
from libs.testing.engines.harmony import sim_with_markers
from libs.testing.servers.listed_registry import ListedRegistry
from libs.testing.wait import until
from libs.testing.workers.hosts import RecordingBus, RecordingKvIndex
from libs.testing.workers.scripted import Plan, ScriptedWorker, scripted_worker
from services.gateway.request.prompt import Catalog, ServedModel
from services.gateway.run import GatewayPorts, open_gateway
from services.gateway.settings import GatewaySettings

TOOL: dict[str, Any] = {"type": "function", "name": "sum", "parameters": {"type": "object", "properties": {}}}
THOUGHT = "<|channel|>analysis<|message|>two tools<|end|><|start|>assistant"
SAID = "<|channel|>final<|message|>Wait."
CALLED = '<|end|><|start|>assistant<|channel|>commentary to=functions.sum <|constrain|>json<|message|>{"a": 1}<|call|>'
DELTAS = "response.output_text.delta"


def spoken(text: str) -> list[int]:
    return sim_with_markers().encode(text, add_special_tokens=False)


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker("m0", "mixed") as found:
        yield found


@pytest.fixture
async def gateway(worker: ScriptedWorker) -> AsyncIterator[str]:
    """The address of a gateway whose only model writes in harmony's format."""
    tokenizer = sim_with_markers()
    ends = frozenset(spoken("<|return|><|call|>"))
    info = replace(load_model_info("builtin:sim"), vocab_size=300, eos_token_ids=ends)
    settings = GatewaySettings.model_validate({"port": 0, "drain_s": 1})
    ports = GatewayPorts(RecordingBus(), ListedRegistry([worker.worker]), RecordingKvIndex())
    sock, tasks = bind(settings.host, 0, "FULCRUM_GATEWAY_PORT"), TaskOwner()
    async with open_gateway(
        settings=settings,
        ports=ports,
        catalog=Catalog([ServedModel(info, tokenizer)]),
        sock=sock,
        clock=SystemClock(),
        tasks=tasks,
    ) as running:
        await until(running.fleet.views, what="the worker")
        yield running.url
    await tasks.close()


@pytest.fixture
async def client(gateway: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0) as found:
        yield found


def prompt(worker: ScriptedWorker) -> str:
    """Return the prompt of the last request."""
    packed = worker.submits[-1].token_ids
    found = [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]
    return b"".join(map(sim_with_markers().token_bytes, found)).decode(errors="replace")


async def test_a_response_has_reasoning_text_and_calls_in_their_order(
    client: openai.AsyncOpenAI, worker: ScriptedWorker
) -> None:
    worker.script, worker.stops = spoken(THOUGHT + SAID + CALLED), True
    found = await client.responses.create(
        model="sim", input="hi", tools=[TOOL], max_output_tokens=len(worker.script), metadata={"a": "b"}
    )
    reasoning, message, call = found.output
    assert (reasoning.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert reasoning.content[0].text == "two tools" and found.output_text == "Wait."
    assert (call.name, call.arguments) == ("sum", '{"a": 1}')
    assert {item.status for item in found.output} == {"completed"}
    assert (found.status, found.store, found.metadata) == ("completed", True, {"a": "b"})
    assert found.usage.output_tokens == len(worker.script)
    assert found.usage.output_tokens_details.reasoning_tokens == len("two tools") + 1


async def test_a_stream_announces_every_item_in_order_and_ends_with_the_same_response(
    client: openai.AsyncOpenAI, worker: ScriptedWorker
) -> None:
    worker.script, worker.stops = spoken(THOUGHT + SAID + CALLED), True
    stream = await client.responses.create(
        model="sim", input="hi", tools=[TOOL], max_output_tokens=len(worker.script), stream=True
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names: list[str] = []
    for event in events:
        if not names or event.type != names[-1]:
            names.append(event.type.removeprefix("response."))
    unique = [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    assert unique == [
        *("created", "in_progress"),
        *(name.format("reasoning_text") for name in text),
        *(name.format("output_text") for name in text),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    last = events[-1].response
    joined = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert joined == last.output[0].content[0].text == "two tools"
    assert "".join(event.delta for event in events if event.type == DELTAS) == last.output_text == "Wait."
    assert last == await client.responses.retrieve(last.id)
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in last.output]


async def test_a_response_continues_an_earlier_one(client: openai.AsyncOpenAI, worker: ScriptedWorker) -> None:
    worker.script, worker.stops = spoken(THOUGHT + CALLED.removeprefix("<|end|><|start|>assistant")), True
    first = await client.responses.create(
        model="sim", input="first question", instructions="Be brief.", tools=[TOOL], max_output_tokens=500
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    worker.script = spoken(SAID + "<|return|>")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "forty-two"}]
    second = await client.responses.create(
        model="sim", input=output, previous_response_id=first.id, tools=[TOOL], max_output_tokens=500
    )
    assert second.previous_response_id == first.id and second.output_text == "Wait."
    assert "first question" in prompt(worker) and "forty-two" in prompt(worker)
    assert "Be brief." not in prompt(worker)
    third = await client.responses.create(model="sim", input="third", previous_response_id=second.id)
    assert all(text in prompt(worker) for text in ("first question", "forty-two", "Wait.", "third"))
    question, last = {"role": "user", "content": "first question"}, {"role": "user", "content": "third"}
    by_hand = await client.responses.create(model="sim", input=[question, *first.output, *output, *second.output, last])
    assert by_hand.usage.input_tokens == third.usage.input_tokens


PAIRS = {
    "response.completed": "response.created",
    "response.output_item.done": "response.output_item.added",
    "response.content_part.done": "response.content_part.added",
    "response.output_text.done": DELTAS,
    "response.reasoning_text.done": "response.reasoning_text.delta",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
}


async def test_stream_events_are_nested_and_name_the_open_item(
    client: openai.AsyncOpenAI, worker: ScriptedWorker
) -> None:
    worker.script, worker.stops = spoken(THOUGHT + SAID + CALLED), True
    stream = await client.responses.create(
        model="sim", input="hi", tools=[TOOL], max_output_tokens=len(worker.script), stream=True
    )
    open_events: list[str] = []
    item, index = "", -1
    async for event in stream:
        if event.type in PAIRS:
            assert open_events.pop() == PAIRS[event.type]
        elif event.type in PAIRS.values() and open_events[-1:] != [event.type]:
            open_events.append(event.type)
        if event.type == "response.output_item.added":
            item, index = event.item.id, index + 1
        assert getattr(event, "item_id", item) == item and getattr(event, "output_index", index) == index
        assert getattr(event, "content_index", 0) == 0
    assert not open_events


@pytest.mark.parametrize("named", [True, False])
async def test_earlier_answers_are_accepted_with_and_without_ids(
    client: openai.AsyncOpenAI, worker: ScriptedWorker, named: bool
) -> None:
    def item(name: str, **fields: Any) -> dict[str, Any]:
        return {**fields, **({"id": name, "status": "completed"} if named else {})}

    parts = [{"type": "output_text", "text": "Acknowledged."}, {"type": "refusal", "refusal": "No more."}]
    said = {"type": "message", "role": "assistant", "content": parts}
    history: Any = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Remember 729."}]},
        item("rs_1", type="reasoning", summary=[], encrypted_content=None),
        item("msg_1", **said),
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which number?"}]},
    ]
    await client.responses.create(model="sim", input=history, max_output_tokens=2)
    assert all(text in prompt(worker) for text in ("Remember 729.", "Acknowledged.No more.", "Which number?"))


@pytest.mark.parametrize("size", [1, 8, 20])
async def test_a_required_call_that_is_cut_off_is_not_returned_as_text(
    client: openai.AsyncOpenAI, worker: ScriptedWorker, size: int
) -> None:
    worker.script = spoken(CALLED.removeprefix("<|end|><|start|>assistant"))
    found = await client.responses.create(
        model="sim", input="hi", tools=[TOOL], tool_choice="required", max_output_tokens=size
    )
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.output_text == ""


async def test_vllms_constraints_are_accepted(client: openai.AsyncOpenAI, worker: ScriptedWorker) -> None:
    grammar = {"structured_outputs": {"choice": ["yes", "no"]}}
    await client.responses.create(model="sim", input="hi", max_output_tokens=2, extra_body=grammar)
    assert "yes" in worker.submits[-1].sampling.guide
    await client.responses.create(model="sim", input="hi", max_output_tokens=2, extra_body={"ignore_eos": True})
    assert worker.submits[-1].sampling.ignore_eos


async def test_a_response_is_stored_unless_refused_and_can_be_read_and_deleted(
    client: openai.AsyncOpenAI,
) -> None:
    kept = await client.responses.create(model="sim", input="hi", max_output_tokens=4)
    assert (kept.status, kept.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (await client.responses.retrieve(kept.id)) == kept
    await client.responses.delete(kept.id)
    unkept = await client.responses.create(model="sim", input="hi", max_output_tokens=4, store=False)
    assert unkept.store is False
    for gone in (kept.id, unkept.id, "resp_0"):
        with pytest.raises(openai.NotFoundError) as found:
            await client.responses.retrieve(gone)
        assert found.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="sim", input="hi", previous_response_id=gone)


async def test_a_response_that_fails_in_mid_stream_reports_it_in_its_last_event(
    client: openai.AsyncOpenAI, worker: ScriptedWorker
) -> None:
    worker.plans.extend(Plan(tokens=2, fail=1) for _ in range(20))  # type: ignore[arg-type]
    stream = await client.responses.create(model="sim", input="hi", max_output_tokens=40, stream=True)
    events = [event async for event in stream]
    assert events[-1].type in ("response.failed", "response.incomplete")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": []}}}}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0]"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ],
    ids=str,
)
async def test_unsupported_fields_are_refused_by_name(
    client: openai.AsyncOpenAI, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        await client.post("/responses", body={"model": "sim", "input": "hi", **body}, cast_to=object)
    assert str(found.value.param).startswith(param), found.value
