#!/bin/sh
# Ask a question with curl and print the events of the answer as they arrive.
exec curl --silent --show-error --fail-with-body --no-buffer "$OPENAI_BASE_URL/chat/completions" \
  -H "authorization: Bearer $OPENAI_API_KEY" -H "content-type: application/json" -d "{
    \"model\": \"$MODEL\",
    \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}],
    \"max_tokens\": 64,
    \"stream\": true
  }"
