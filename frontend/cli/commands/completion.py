"""`quire completion`: a script that has a shell complete `quire`'s commands and options, by argcomplete.

The shell asks `quire` itself, which answers from the parser of the command that stands in the line.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from ....ipc.errors import QuireError
from ..entry import COMMANDS
from ..parser import ExitCode, Parser, describe

SHELLS = ("bash", "zsh", "fish")
_EPILOG = """\
bash: source <(quire completion bash), in ~/.bashrc; zsh: source <(quire completion zsh), after compinit in
~/.zshrc; fish: quire completion fish > ~/.config/fish/completions/quire.fish
"""


def run(argv: Sequence[str]) -> int:
    """Run `quire completion`."""
    parser = Parser("quire completion", "Print a shell's completion script.", _EPILOG, " SHELL")
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")
    options = parser.parse(argv)
    try:
        from argcomplete import shellcode  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise QuireError("argcomplete is not installed: pip install 'quire[completion]'") from None
    sys.stdout.write(shellcode(["quire"], shell=options.shell))
    return ExitCode.OK


def complete() -> None:
    """Answer a shell that asks, by argcomplete's variables of the environment, and end the process."""
    from argcomplete import autocomplete  # pyright: ignore[reportMissingImports]
    from argcomplete.lexers import split_line  # pyright: ignore[reportMissingImports]

    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    words = split_line(line, point)[3][1:]
    parser, num_commands = find_parser(words)
    os.environ["_ARGCOMPLETE"] = f"{1 + num_commands}"  # the first word that is the parser's, counted from 1
    autocomplete(parser, always_complete_options=False)


def find_parser(words: Sequence[str]) -> tuple[Parser, int]:
    """What parses the line that begins with these words, and how many of them are commands before its own."""
    known: Parser | tuple[str, ...] = tuple(COMMANDS)
    depth = 0
    while isinstance(known, tuple) and depth < len(words) and words[depth] in known:
        depth += 1
        run_command = importlib.import_module(COMMANDS[words[0]].module, __package__).run
        known = describe(run_command, words[1:depth])
    if isinstance(known, Parser):
        return known, depth
    parser = Parser("quire", "")
    parser.add_argument("command", choices=known)
    return parser, depth
