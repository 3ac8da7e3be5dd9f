"""instructor over OpenAI's client, by tools and by JSON schema."""

import asked
import instructor
import openai


def main() -> None:
    """with_instructor.py BASE_URL MODEL."""
    url, model = asked.asked()
    client = openai.OpenAI(base_url=url, api_key=asked.KEY, max_retries=0)
    common = {
        "model": model,
        "messages": [{"role": "user", "content": asked.QUESTION}],
        "max_tokens": asked.MAX_TOKENS,
        "max_retries": 0,
    }
    by_tools = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    called = by_tools.create(response_model=asked.City, **common)
    by_schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    filled = by_schema.create(response_model=asked.City, **common)
    partial = list(by_schema.create_partial(response_model=asked.City, **common))
    asked.tell(streamed=str(partial[-1]), pieces=len(partial), called=called.model_dump(), filled=filled)


if __name__ == "__main__":
    main()
