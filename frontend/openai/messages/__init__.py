"""/v1/messages: bodies to conversations, answers and streams as Anthropic's blocks."""
