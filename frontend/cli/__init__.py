"""The `quire` command, one file a subcommand."""
