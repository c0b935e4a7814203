"""What frontends, core and workers say to each other: messages, frames, sockets, and both sides' rules."""
