"""`quire completion`: a script that has a shell complete `quire`'s commands and options."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ..completion.command_words import read_command_words
from ..completion.shells import SHELLS
from ..entry import COMMANDS
from ..exit_codes import ExitCode
from ..parser import Parser

_EPILOG = """\
bash: source <(quire completion bash), in ~/.bashrc; zsh: source <(quire completion zsh), after compinit in
~/.zshrc; fish: quire completion fish > ~/.config/fish/completions/quire.fish
"""


def run(argv: Sequence[str]) -> int:
    """Run `quire completion`."""
    parser = Parser("quire completion", "Print a shell's completion script.", _EPILOG, " SHELL")
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help=f"one of {', '.join(SHELLS)}")
    options = parser.parse(argv)
    runs = {
        name: importlib.import_module(command.module, __package__).run for name, command in COMMANDS.items()
    }
    sys.stdout.write(SHELLS[options.shell](read_command_words(runs)))
    return ExitCode.OK
