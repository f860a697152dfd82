"""The agent service: agents talk to it as if it were OpenAI or Anthropic, and their turns become training data."""
