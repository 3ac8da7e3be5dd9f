"""LlamaIndex's OpenAILike."""

import asked
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(name: str, people: int) -> str:
    """Tell the weather of a city."""
    return f"rain over {people} people in {name}"


def main() -> None:
    """with_llama_index.py BASE_URL MODEL."""
    url, model = asked.asked()

    def chat(max_tokens: int) -> OpenAILike:
        return OpenAILike(
            model=model, api_base=url, api_key=asked.KEY, is_chat_model=True, is_function_calling_model=True,
            should_use_structured_outputs=True, context_window=2048, max_tokens=max_tokens, max_retries=0,
        )  # fmt: skip

    question = [ChatMessage(role="user", content=asked.QUESTION)]
    pieces = [chunk.delta for chunk in chat(asked.STREAM_TOKENS).stream_chat(question) if chunk.delta]
    tool = FunctionTool.from_defaults(fn=weather, fn_schema=asked.City)
    llm = chat(asked.MAX_TOKENS)
    answer = llm.chat_with_tools([tool], chat_history=question, tool_required=True)
    call = llm.get_tool_calls_from_response(answer)[0]
    assert call.tool_name == "weather"
    filled = llm.as_structured_llm(asked.City).chat(question).raw
    asked.tell(streamed="".join(pieces), pieces=len(pieces), called=call.tool_kwargs, filled=filled)


if __name__ == "__main__":
    main()
