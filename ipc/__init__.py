"""Everything that crosses a process boundary: messages, parameters, config, sockets, child processes."""
