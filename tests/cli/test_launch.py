"""`quire launch` gives coding agents their settings by environment and command line, and becomes them."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.cli.commands import launch
from quire.frontend.cli.entry import run_command

KEY = "sk-secret"
NAME = 'org/a "model"'


class _Models(BaseHTTPRequestHandler):
    """A server with an embedding model and one that generates, for who has its key."""

    def do_GET(self) -> None:
        has_key = self.headers["authorization"] == f"Bearer {KEY}"
        cards = [{"id": "encoder", "tasks": ["embed"], "max_model_len": 512}]
        cards += [{"id": NAME, "tasks": ["generate"], "max_model_len": 40_000}]
        cards += [{"id": "small", "tasks": ["generate"], "max_model_len": 2048}]
        body = json.dumps({"data": cards} if has_key and self.path == "/v1/models" else {}).encode()
        self.send_response(200 if has_key else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Models)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(30)
    server.server_close()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", KEY)


def read_shown(text: str) -> tuple[dict[str, str], list[str]]:
    """What --print shows, as a shell takes it."""
    *exports, command = text.splitlines()
    pairs = [shlex.split(line)[1].partition("=") for line in exports]
    return {name: value for name, _, value in pairs}, shlex.split(command)


def test_claude_code_gets_its_models_its_context_and_no_header_that_changes(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["launch", "claude", "--url", f"{url}/v1/", "--print", "--", "-p", "Hi"]) == 0
    text = capsys.readouterr().out
    shown, command = read_shown(text)
    assert KEY not in text
    assert (shown["ANTHROPIC_BASE_URL"], shown["ANTHROPIC_AUTH_TOKEN"]) == (url, "$QUIRE_API_KEY")
    assert {shown[f"ANTHROPIC_DEFAULT_{role}_MODEL"] for role in ("OPUS", "SONNET", "HAIKU")} == {NAME}
    assert command[:3] == ["claude", "--model", NAME]
    assert command[-2:] == ["-p", "Hi"]
    settings = json.loads(command[4])["env"]
    assert settings["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert settings["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"
    assert settings.items() <= shown.items()
    assert (settings["CLAUDE_CODE_AUTO_COMPACT_WINDOW"], settings["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == (
        "40000",
        "10000",
    )


def test_codex_gets_a_provider_in_toml_on_its_command_line(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["launch", "codex", "--url", url, "--print"]) == 0
    shown, command = read_shown(capsys.readouterr().out)
    overrides = [value for flag, value in itertools.pairwise(command) if flag == "-c"]
    config = tomllib.loads("\n".join(overrides))
    provider = {"name": "Quire", "base_url": f"{url}/v1", "wire_api": "responses", "env_key": "QUIRE_API_KEY"}
    assert config["model_providers"]["quire"] == provider
    assert (config["model_provider"], config["model_context_window"]) == ("quire", 40_000)
    assert command[-2:] == ["-m", NAME]
    assert shown == {"QUIRE_API_KEY": "$QUIRE_API_KEY"}


def test_opencode_gets_a_config_that_names_the_key_by_its_variable(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["launch", "opencode", "--url", url, "--print", "--model", NAME]) == 0
    shown, command = read_shown(capsys.readouterr().out)
    config = json.loads(shown["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["quire"]
    assert config["model"] == config["small_model"] == f"quire/{NAME}"
    assert provider["options"] == {"baseURL": f"{url}/v1", "apiKey": "{env:QUIRE_API_KEY}"}
    assert provider["models"] == {NAME: {"name": NAME, "limit": {"context": 40_000, "output": 10_000}}}
    assert command == ["opencode"]


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_the_agent_takes_the_place_of_the_command(url: str, agent: str, tmp_path: Path) -> None:
    program = tmp_path / agent
    program.write_text('#!/bin/sh\necho "$$ $# $QUIRE_API_KEY$ANTHROPIC_AUTH_TOKEN"\nexit 7\n')
    program.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    command = [sys.executable, "-m", "quire", "launch", agent, "--url", url, "--api-key", KEY, "--", "more"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(home)}
    env.pop("QUIRE_API_KEY")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 7
    pid, num_arguments, key = told.split()
    assert (int(pid), key) == (process.pid, KEY)
    assert int(num_arguments) > 0
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "env_key", "line"),
    [
        (
            ["claude", "--model", "encoder"],
            KEY,
            f"model='encoder': expected a model of URL that generates: {NAME}, small",
        ),
        (["claude"], "wrong", "api_key='...': expected a key of URL (--api-key, QUIRE_API_KEY)"),
        (["cluade"], KEY, "AGENT='cluade': expected one of claude, codex, opencode"),
        (["claude", "--url", "http://127.0.0.1:1"], KEY, "`quire serve MODEL` starts one"),
        (["claude", "--url", "nonsense"], KEY, "url=nonsense: no server answers there"),
    ],
)
def test_what_cannot_be_launched_is_said_with_what_can(
    url: str,
    arguments: list[str],
    env_key: str,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", env_key)
    assert run_command(["launch", "--url", url, *arguments]) != 0
    assert line.replace("URL", url) in capsys.readouterr().err


def test_the_only_server_that_runs_is_found_by_its_daemons_name(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = ["other", f"serve-{url.rpartition(':')[2]}"]
    monkeypatch.setattr(launch, "list_daemons", lambda: running)
    assert run_command(["launch", "claude", "--print"]) == 0
    assert f"ANTHROPIC_BASE_URL={url}\n" in capsys.readouterr().out
    running.append("serve-1")
    assert run_command(["launch", "claude", "--print", "--url", "http://127.0.0.1:1"]) == 1
    assert "`quire serve --attach other` starts one" in capsys.readouterr().err


def test_an_agent_that_is_not_installed_is_named_with_its_package(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_command(["launch", "codex", "--url", url, "--model", "small"]) == 1
    said = capsys.readouterr().err
    assert "npm install -g @openai/codex" in said
    assert "small has a context of 2048 tokens" in said
