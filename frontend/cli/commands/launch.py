"""`quire launch`: run a coding agent on a Quire server, by settings of this run alone.

All of them go by the agent's environment and command line: no file of the user's is read or written.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import Any, NamedTuple, NoReturn

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
_MAX_OUTPUT = 32_000  # tokens of an answer, or a quarter of the context


class _Target(NamedTuple):
    """What an agent is to use."""

    url: str
    key: str
    model: str
    context: int

    @property
    def max_output(self) -> int:
        """Tokens of an answer that leave room for what was asked."""
        return min(_MAX_OUTPUT, self.context // 4)


class _Agent(NamedTuple):
    """title, package: as people and npm know it. configure: its environment, and arguments."""

    title: str
    package: str
    configure: Callable[[_Target], tuple[dict[str, str], list[str]]]


def _configure_claude(target: _Target) -> tuple[dict[str, str], list[str]]:
    """The first three change what is before the conversation in each prompt: nothing cached would be found.

    Releases read them from settings only, which may be given on the command line.
    """
    settings = {
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.max_output),
    }
    roles = ("OPUS", "SONNET", "HAIKU")
    models = dict.fromkeys((f"ANTHROPIC_DEFAULT_{role}_MODEL" for role in roles), target.model)
    models["CLAUDE_CODE_SUBAGENT_MODEL"] = target.model
    access = {"ANTHROPIC_BASE_URL": target.url, "ANTHROPIC_API_KEY": "", "ANTHROPIC_AUTH_TOKEN": target.key}
    arguments = ["--model", target.model, "--settings", json.dumps({"env": settings})]
    return access | models | settings, arguments


def _configure_codex(target: _Target) -> tuple[dict[str, str], list[str]]:
    """A JSON text is one of TOML, too."""
    provider = {
        "name": "Quire",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "env_key": _KEY_VARIABLE,
    }
    settings: dict[str, Any] = {"model_provider": "quire", "model_context_window": target.context}
    settings |= {f"model_providers.quire.{name}": value for name, value in provider.items()}
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return {_KEY_VARIABLE: target.key}, [*words, "-m", target.model]


def _configure_opencode(target: _Target) -> tuple[dict[str, str], list[str]]:
    model = {"name": target.model, "limit": {"context": target.context, "output": target.max_output}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Quire",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{_KEY_VARIABLE}}}"},
        "models": {target.model: model},
    }
    name = f"quire/{target.model}"
    config = {"model": name, "small_model": name, "provider": {"quire": provider}}
    return {_KEY_VARIABLE: target.key, "OPENCODE_CONFIG_CONTENT": json.dumps(config)}, []


AGENTS = {
    "claude": _Agent("Claude Code", "@anthropic-ai/claude-code", _configure_claude),
    "codex": _Agent("Codex", "@openai/codex", _configure_codex),
    "opencode": _Agent("opencode", "opencode-ai", _configure_opencode),
}


def run(argv: Sequence[str]) -> int:
    """Run `quire launch`; becomes the agent unless --print was given."""
    words, extra = split_at_dashes(argv)
    parser = Parser("quire launch", "Run a coding agent on a Quire server.", _EPILOG, " AGENT [-- ARGUMENTS]")
    parser.add_argument("agent", choices=AGENTS, metavar="AGENT", help=", ".join(AGENTS))
    text = "the server; default: the only one of this user that runs, or http://127.0.0.1:8000"
    parser.add_argument("--url", metavar="URL", help=text)
    parser.add_argument(
        "--model", metavar="NAME", help="one of the server's; default: the first that can chat"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's key (${_KEY_VARIABLE})")
    parser.add_argument("--print", action="store_true", help="only show the settings")
    options = parser.parse(words)
    agent = AGENTS[options.agent]
    key: str = options.api_key or os.environ.get(_KEY_VARIABLE) or "none"
    url: str = options.url or f"http://127.0.0.1:{_find_port()}"
    target = _find_target(url.rstrip("/").removesuffix("/v1"), key, options.model)
    environment, arguments = agent.configure(target)
    if target.context < _SMALL_CONTEXT:
        small = f"{target.model} has a context of {target.context} tokens"
        print(f"quire: {small}; {agent.title} wants at least some {_SMALL_CONTEXT}", file=sys.stderr)
    command = [options.agent, *arguments, *extra]
    if options.print:
        _show(environment, command, None if options.api_key else os.environ.get(_KEY_VARIABLE))
        return ExitCode.OK
    return _become(command, os.environ | environment, agent.package)


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


def _find_target(url: str, key: str, model: str | None) -> _Target:
    """Ask the server what it has. Raises ConfigError and DaemonError."""
    cards = _ask_models(url, key)
    able = [name for name, card in cards.items() if "generate" in card.get("tasks", ("generate",))]
    chosen = model or next(iter(able), "")
    if chosen not in able:
        raise ConfigError(
            "model", chosen, f"a model of {url} that generates: {', '.join(able) or 'there is none'}"
        )
    return _Target(url, key, chosen, cards[chosen].get("max_model_len") or _SMALL_CONTEXT)


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
