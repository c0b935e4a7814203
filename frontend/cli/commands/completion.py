"""`quire completion`: a script that has a shell complete `quire`'s commands and options.

They are read off the commands' own parsers; where a value is free, files are offered.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..entry import COMMANDS
from ..parser import ExitCode, Parser, describe

_EPILOG = """\
bash: source <(quire completion bash), in ~/.bashrc; zsh: source <(quire completion zsh), after compinit in
~/.zshrc; fish: quire completion fish > ~/.config/fish/completions/quire.fish
"""
Run = Callable[[Sequence[str]], int]
_BASH = """\
# quire's completion for bash: source <(quire completion bash)
_quire() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
  local path="" flags="" values="" below=""
  if (( COMP_CWORD > 1 )); then path="${{COMP_WORDS[1]}}"; fi
  case "$path" in {parents}) (( COMP_CWORD > 2 )) && path="$path ${{COMP_WORDS[2]}}" ;; esac
  case "$path" in
{flags}
  esac
  case "$path $prev" in
{values}
  esac
  if [[ -n "$values" ]]; then mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur")
  elif [[ -n "$below" ]]; then mapfile -t COMPREPLY < <(compgen -W "$below" -- "$cur")
  elif [[ "$cur" == -* ]]; then mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$cur")
  else mapfile -t COMPREPLY < <(compgen -f -- "$cur"); fi
}}
complete -o filenames -F _quire quire
"""
_ZSH = """\
#compdef quire
# quire's completion for zsh: source <(quire completion zsh)
autoload -U +X bashcompinit
bashcompinit
"""


@dataclass(frozen=True, slots=True)
class CommandWords:
    """Of one command: `commands` below it, or its options with the values to choose from, () for any."""

    commands: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    switches: frozenset[str] = frozenset()  # options without a value


Commands = Mapping[str, CommandWords]


def read_command_words(commands: Mapping[str, Run]) -> dict[str, CommandWords]:
    """'serve', 'daemon', 'daemon start' ... -> its words; each command's `run` is asked and does nothing."""
    found: dict[str, CommandWords] = {}
    for name, run in commands.items():
        words = _ask(run, [])
        found[name] = words
        for below in words.commands:
            found[f"{name} {below}"] = _ask(run, [below])
    return found


def _ask(run: Run, argv: list[str]) -> CommandWords:
    found = describe(run, argv)
    return CommandWords(commands=found) if isinstance(found, tuple) else _read_parser(found.actions)


def _read_parser(actions: Mapping[str, argparse.Action]) -> CommandWords:
    shown = {
        flag: action
        for flag, action in actions.items()
        if flag.startswith("--") and action.help != argparse.SUPPRESS
    }
    return CommandWords(
        options={flag: tuple(map(str, action.choices or ())) for flag, action in shown.items()},
        switches=frozenset(flag for flag, action in shown.items() if action.nargs == 0),
    )


def write_bash(commands: Commands) -> str:
    """For bash 4 and newer."""
    parents = "|".join(name for name, words in commands.items() if words.commands)
    top = " ".join(name for name in commands if " " not in name)
    flags = [f'    "") below="{top}" ;;']
    values: list[str] = []
    for name, words in commands.items():
        if words.commands:
            flags.append(f'    "{name}") below="{" ".join(words.commands)}" ;;')
        elif words.options:
            flags.append(f'    "{name}") flags="{" ".join(words.options)}" ;;')
        values += [
            f'    "{name} {flag}") values="{" ".join(choices)}" ;;'
            for flag, choices in words.options.items()
            if choices
        ]
    return _BASH.format(parents=parents, flags="\n".join(flags), values="\n".join(values))


def write_zsh(commands: Commands) -> str:
    """zsh runs bash's completions."""
    return _ZSH + write_bash(commands)


def write_fish(commands: Commands) -> str:
    """A line an option."""
    lines = ["# quire's completion for fish: quire completion fish | source"]
    top = " ".join(name for name in commands if " " not in name)
    lines.append(f"complete -c quire -n __fish_use_subcommand -f -a '{top}'")
    for name, words in commands.items():
        parent, _, below = name.partition(" ")
        seen = f"__fish_seen_subcommand_from {parent}"
        if below:
            seen += f"; and __fish_seen_subcommand_from {below}"
        if words.commands:
            names = " ".join(words.commands)
            lines.append(
                f"complete -c quire -n '{seen}; and not __fish_seen_subcommand_from {names}' -f -a '{names}'"
            )
        lines += [f"complete -c quire -n '{seen}' {part}" for part in _list_fish_options(words)]
    return "\n".join(lines) + "\n"


def _list_fish_options(words: CommandWords) -> Iterable[str]:
    for flag, choices in words.options.items():
        option = f"-l {flag.removeprefix('--')}"
        if choices:
            option += f" -x -a '{' '.join(choices)}'"
        elif flag not in words.switches:
            option += " -r"
        yield option


SHELLS = {"bash": write_bash, "zsh": write_zsh, "fish": write_fish}


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
