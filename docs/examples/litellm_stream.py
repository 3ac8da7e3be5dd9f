"""Ask a question through LiteLLM and print the answer as it arrives."""

import os

import litellm

stream = litellm.completion(
    model=f"hosted_vllm/{os.environ['MODEL']}",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=64,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
