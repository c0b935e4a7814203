"""The KV cache's blocks: who has which, and which hold a prefix that another request may use."""
