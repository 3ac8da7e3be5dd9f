import json
import sys

import openai


def main() -> None:
    """ask.py BASE_URL BODY: request one whole answer and one stream."""
    client = openai.OpenAI(base_url=sys.argv[1], api_key="any", max_retries=0)
    asked = json.loads(sys.argv[2])
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == asked["max_tokens"]
    print(whole.choices[0].message.model_dump_json())


if __name__ == "__main__":
    main()
