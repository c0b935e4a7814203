"""The core's side of its clients: who they are, what they ask for, and what waits to be sent to them."""
