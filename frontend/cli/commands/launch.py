"""`quire launch`: run a coding agent on a Quire server, by settings of this run alone.

All of them (agents.json) go by the agent's environment and command line: no file of the user's is read or
written. Claude Code's settings switch off what changes each prompt before the conversation, of which nothing
cached would be found; some releases read these from settings only, which may be given on the command line.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NoReturn

from ....ipc.daemon.run_dir import list_daemons
from ....ipc.errors import ConfigError, DaemonError, make_printable
from ..parser import ExitCode, Parser, split_at_dashes

_EPILOG = """\
What stands behind -- goes to the agent: quire launch claude -- -p "What is in this folder?". The API key is
--api-key or QUIRE_API_KEY. Settings go by the agent's environment and command line, so none of your files is
changed; --print shows them as a shell has them, to put where you like.
"""
_KEY_VARIABLE = "QUIRE_API_KEY"
_SERVER = "serve-"  # and its port: the name of a server's daemon
_TIMEOUT_S = 10.0
_SMALL_CONTEXT = 16_384  # tokens; agents' own prompts and tools take about as many
_AGENTS = Path(__file__).with_name("agents.json")
_PLACE = re.compile(r'"\{(?P<number>\w+):d\}"|\{(?P<text>\w+)\}')
_MAX_OUTPUT = 32_000  # tokens of an answer, or a quarter of the context


def run(argv: Sequence[str]) -> int:
    """Run `quire launch`; becomes the agent unless --print was given."""
    words, extra = split_at_dashes(argv)
    parser = Parser("quire launch", "Run a coding agent on a Quire server.", _EPILOG, " AGENT [-- ARGUMENTS]")
    names = list(json.loads(_AGENTS.read_text()))
    parser.add_argument("agent", choices=names, metavar="AGENT", help=", ".join(names))
    text = "the server; default: the only one of this user that runs, or http://127.0.0.1:8000"
    parser.add_argument("--url", metavar="URL", help=text)
    parser.add_argument(
        "--model", metavar="NAME", help="one of the server's; default: the first that can chat"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's key (${_KEY_VARIABLE})")
    parser.add_argument("--print", action="store_true", help="only show the settings")
    options = parser.parse(words)
    key: str = options.api_key or os.environ.get(_KEY_VARIABLE) or "none"
    url: str = options.url or f"http://127.0.0.1:{_find_port()}"
    values = _find_values(url.rstrip("/").removesuffix("/v1"), key, options.model)
    agent = _read_agent(options.agent, values)
    if values["context"] < _SMALL_CONTEXT:
        small = f"{values['model']} has a context of {values['context']} tokens"
        print(f"quire: {small}; {agent['title']} wants at least some {_SMALL_CONTEXT}", file=sys.stderr)
    environment = {name: _as_word(value) for name, value in agent["environment"].items()}
    command = [options.agent, *map(_as_word, agent["arguments"]), *extra]
    if options.print:
        _show(environment, command, None if options.api_key else os.environ.get(_KEY_VARIABLE))
        return ExitCode.OK
    return _become(command, os.environ | environment, agent["package"])


def _read_agent(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """An agent's entry with the values in their places, those in a text of {name:d} alone as numbers."""

    def insert(match: re.Match[str]) -> str:
        value = values[match["number"] or match["text"]]
        return str(value) if match["number"] else json.dumps(str(value))[1:-1]

    return json.loads(_PLACE.sub(insert, _AGENTS.read_text()))[name]


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _become(command: list[str], environment: dict[str, str], package: str) -> NoReturn:
    """Run the command in the place of this process. Raises DaemonError where it is not installed."""
    if (program := shutil.which(command[0])) is None:
        hint = f"npm install -g {package} installs it; --print shows the settings without it"
        raise DaemonError(f"{command[0]}: not found on PATH; {hint}")
    sys.stdout.flush()
    os.execve(program, command, environment)


def _show(environment: dict[str, str], command: list[str], key: str | None) -> None:
    """As a shell has them. key: what is in the shell's environment, and not shown."""
    for name, value in environment.items():
        shown = f'"${_KEY_VARIABLE}"' if value == key else shlex.quote(value)
        print(make_printable(f"export {name}={shown}"))
    print(make_printable(shlex.join(command)))


def _find_port() -> str:
    """Of `quire serve`, whose daemon is named after it."""
    ports = [name.removeprefix(_SERVER) for name in list_daemons() if name.startswith(_SERVER)]
    return ports[0] if len(ports) == 1 and ports[0].isdigit() else "8000"


def _find_values(url: str, key: str, model: str | None) -> dict[str, Any]:
    """What an agent is told, of what the server has. Raises ConfigError and DaemonError."""
    cards = _ask_models(url, key)
    able = [name for name, card in cards.items() if "generate" in card.get("tasks", ("generate",))]
    chosen = model or next(iter(able), "")
    if chosen not in able:
        raise ConfigError(
            "model", chosen, f"a model of {url} that generates: {', '.join(able) or 'there is none'}"
        )
    context: int = cards[chosen].get("max_model_len") or _SMALL_CONTEXT
    max_output = min(_MAX_OUTPUT, context // 4)
    return {"url": url, "key": key, "model": chosen, "context": context, "max_output": max_output}


def _ask_models(url: str, key: str) -> dict[str, dict[str, Any]]:
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return {card["id"]: card for card in json.load(answer)["data"]}
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConfigError("api_key", "...", f"a key of {url} (--api-key, {_KEY_VARIABLE})") from None
        raise DaemonError(f"{url}/v1/models: {error.code} {error.reason}") from None
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        running = [name for name in list_daemons() if not name.startswith(_SERVER)]
        start = f"quire serve --attach {running[0]}" if running else "quire serve MODEL"
        raise DaemonError(f"url={url}: no server answers there ({error}); `{start}` starts one") from None
