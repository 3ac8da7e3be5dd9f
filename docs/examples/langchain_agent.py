"""Let a LangChain agent with one tool answer a question."""

import os
from typing import Literal

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

MAX_TURNS = 4


@tool
def population(city: Literal["Paris", "Rome"]) -> int:
    """Return the number of people who live in a city."""
    return {"Paris": 2_100_000, "Rome": 2_800_000}[city]


chat = ChatOpenAI(model=os.environ["MODEL"], base_url=os.environ["OPENAI_BASE_URL"], max_tokens=256)
messages: list[BaseMessage] = [HumanMessage("How many people live in Paris?")]
# The first turn has to call the tool. In later turns the model decides.
answer = chat.bind_tools([population], tool_choice="population").invoke(messages)
for _ in range(MAX_TURNS):
    messages.append(answer)
    if not answer.tool_calls:
        break
    for call in answer.tool_calls:
        result = population.invoke(call)
        print(f"{call['name']}({call['args']}) = {result.content}")
        messages.append(result)
    answer = chat.bind_tools([population]).invoke(messages)
print(answer.text)
