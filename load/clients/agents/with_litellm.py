"""LiteLLM's completion, as its proxy calls it."""

import json

import asked
import litellm


def main() -> None:
    """with_litellm.py BASE_URL MODEL."""
    url, model = asked.asked()
    common = {
        "model": f"hosted_vllm/{model}",
        "api_base": url,
        "api_key": asked.KEY,
        "messages": [{"role": "user", "content": asked.QUESTION}],
        "num_retries": 0,
    }
    stream = litellm.completion(**common, stream=True, max_tokens=asked.STREAM_TOKENS)
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
    named = {"type": "function", "function": {"name": asked.TOOL}}
    answer = litellm.completion(**common, tools=[asked.tool()], tool_choice=named, max_tokens=asked.MAX_TOKENS)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == asked.TOOL
    filled = litellm.completion(**common, response_format=asked.City, max_tokens=asked.MAX_TOKENS)
    asked.tell(
        streamed="".join(pieces),
        pieces=len(pieces),
        called=json.loads(call.function.arguments),
        filled=asked.City.model_validate_json(filled.choices[0].message.content),
    )


if __name__ == "__main__":
    main()
