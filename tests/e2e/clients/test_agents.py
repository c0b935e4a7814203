"""Command lines that run agents, against `quire serve` with the pocket model: a tool of theirs is called.

`codex` (Responses) and `claude` (Messages) are where installed.py looks. They get short system prompts, since
their own are longer than the pocket model's context, and their tool from mcp_tools.py. What else they say to
a model is left out by a chat template (agent_prompt.jinja).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire.frontend.models.model_folder import pocket_folder
from served import Served

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # mcp_tools.py runs without pytest too

from installed import find_node_program  # noqa: E402
from local_tools import QUESTION, RESULT  # noqa: E402

SERVER = {"command": sys.executable, "args": [str(HERE / "mcp_tools.py")]}
SYSTEM_PROMPT = "You are a helpful assistant."
KEY = "sk-agents"
AGENT_S = 300


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The pocket model, taking the likeliest tokens: these clients cannot ask for that."""
    folder = tmp_path_factory.mktemp("agents") / "pocket"
    shutil.copytree(pocket_folder(), folder)
    template = folder / "chat_template.jinja"
    template.write_text((HERE / "agent_prompt.jinja").read_text() + template.read_text())
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"temperature": 0}))
    server = Served(str(folder), "--served-model-name", "pocket", env={"QUIRE_API_KEY": KEY}, api_key=KEY)
    yield server
    assert server.stop() == 0


def run(command: list[str], home: Path, **env: str) -> str:
    """What the command line says in the end, in a home and a folder of its own."""
    work = home / "work"
    work.mkdir()
    done = subprocess.run(
        command,
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home)} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=AGENT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(AGENT_S + 100)
def test_claude_code_calls_a_tool_and_uses_its_result(served: Served, tmp_path: Path) -> None:
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"tools": SERVER}}))
    command = [
        find_node_program("claude"),
        "-p",
        QUESTION,
        "--model",
        "pocket",
        "--system-prompt",
        SYSTEM_PROMPT,
    ]
    command += ["--tools", "", "--mcp-config", str(config), "--strict-mcp-config"]
    command += ["--allowedTools", "mcp__tools__calculator"]
    said = run(
        command,
        tmp_path,
        ANTHROPIC_BASE_URL=served.url,
        ANTHROPIC_API_KEY=served.api_key,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="300",
    )
    assert RESULT in said


@pytest.mark.slow
@pytest.mark.timeout(AGENT_S + 100)
def test_launch_starts_claude_code_on_the_server(served: Served, tmp_path: Path) -> None:
    path = f"{Path(find_node_program('claude')).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "quire", "launch", "claude", "--url", served.url, "--"]
    command += ["-p", "What is 12 plus 30?", "--system-prompt", SYSTEM_PROMPT, "--tools", ""]
    assert "42" in run(command, tmp_path, PATH=path, QUIRE_API_KEY=KEY)


@pytest.mark.slow
@pytest.mark.timeout(AGENT_S + 100)
def test_codex_calls_a_tool_and_uses_its_result(served: Served, tmp_path: Path) -> None:
    (tmp_path / "prompt.md").write_text(SYSTEM_PROMPT)
    (tmp_path / ".codex").mkdir()
    features = ("multi_agent", "goals", "shell_tool", "unified_exec", "view_image", "plugins", "apps")
    # A JSON value is a TOML value, but for objects.
    settings = {
        "model": "pocket",
        "model_provider": "quire",
        "model_instructions_file": str(tmp_path / "prompt.md"),
        "approval_policy": "never",
        "skills.include_instructions": False,
        "model_providers.quire.name": "quire",
        "model_providers.quire.base_url": f"{served.url}/v1",
        "model_providers.quire.wire_api": "responses",
        "model_providers.quire.env_key": "QUIRE_KEY",
        "mcp_servers.tools.command": SERVER["command"],
        "mcp_servers.tools.args": SERVER["args"],
        "mcp_servers.tools.default_tools_approval_mode": "approve",
    } | {f"features.{name}": False for name in features}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    (tmp_path / ".codex" / "config.toml").write_text("\n".join(lines))
    command = [find_node_program("codex"), "exec", "--skip-git-repo-check", QUESTION]
    assert RESULT in run(command, tmp_path, QUIRE_KEY=served.api_key)
