"""How models write thoughts and tool calls: one description a format, from which parser and grammar come."""
