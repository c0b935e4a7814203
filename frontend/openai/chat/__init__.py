"""/v1/chat/completions: bodies to conversations, answers and streams as OpenAI's chunks."""
