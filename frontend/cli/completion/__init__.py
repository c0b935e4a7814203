"""What a shell completes of `quire`: read off the commands' own parsers, written in the shell's language."""
