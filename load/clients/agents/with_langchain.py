"""LangChain's ChatOpenAI."""

import asked
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI


def main() -> None:
    """with_langchain.py BASE_URL MODEL."""
    url, model = asked.asked()

    def chat(max_tokens: int) -> ChatOpenAI:
        return ChatOpenAI(base_url=url, model=model, api_key=asked.KEY, max_tokens=max_tokens, max_retries=0)

    pieces = [chunk.text for chunk in chat(asked.STREAM_TOKENS).stream(asked.QUESTION) if chunk.text]
    bound = chat(asked.MAX_TOKENS).bind_tools([asked.tool()], tool_choice=asked.TOOL)
    message = bound.invoke(asked.QUESTION)
    calls = message.tool_calls
    assert {call["name"] for call in calls} == {asked.TOOL}
    answers = [ToolMessage("rain", tool_call_id=call["id"]) for call in calls]
    chat(2).bind_tools([asked.tool()]).invoke([HumanMessage(asked.QUESTION), message, *answers])
    filled = chat(asked.MAX_TOKENS).with_structured_output(asked.City, method="json_schema").invoke(asked.QUESTION)
    asked.tell(streamed="".join(pieces), pieces=len(pieces), called=calls[0]["args"], filled=filled)


if __name__ == "__main__":
    main()
