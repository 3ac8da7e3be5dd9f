"""OpenAI's client for Python: chat and responses."""

import json

import asked
import openai


def main() -> None:
    """with_openai.py BASE_URL MODEL."""
    url, model = asked.asked()
    client = openai.OpenAI(base_url=url, api_key=asked.KEY, max_retries=0)
    messages = [{"role": "user", "content": asked.QUESTION}]
    with client.chat.completions.stream(model=model, messages=messages, max_tokens=asked.STREAM_TOKENS) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
    called = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[asked.tool()],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=asked.MAX_TOKENS,
    )
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == asked.TOOL and called.choices[0].finish_reason == "tool_calls"
    calls = called.choices[0].message.tool_calls
    answers = [{"role": "tool", "tool_call_id": each.id, "content": "rain"} for each in calls]
    history = [*messages, called.choices[0].message, *answers]
    client.chat.completions.create(model=model, messages=history, tools=[asked.tool()], max_tokens=2)
    filled = client.chat.completions.parse(
        model=model, messages=messages, response_format=asked.City, max_tokens=asked.MAX_TOKENS
    )
    response = client.responses.parse(
        model=model, input=asked.QUESTION, text_format=asked.City, max_output_tokens=asked.MAX_TOKENS
    )
    assert response.output_parsed is not None
    asked.tell(
        streamed="".join(pieces),
        pieces=len(pieces),
        called=json.loads(call.function.arguments),
        filled=filled.choices[0].message.parsed,
    )


if __name__ == "__main__":
    main()
