"""Text in, text out: the processes that users talk to. Never imports torch or transformers."""
