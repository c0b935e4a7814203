"""Clients that others wrote, against `quire serve` with the pocket model and an API key.

The slow ones need packages of their own: those of the extra `clients`, in this interpreter or in the one that
QUIRE_CLIENTS_PYTHON names, and node with npm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from served import Served

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # scenarios.py runs without pytest too

import tool_loops  # noqa: E402, F401  # its scenarios are listed too, and those of the next
import vectors  # noqa: E402, F401
from scenarios import SCENARIOS  # noqa: E402

LOAD_S = int(os.environ.get("QUIRE_CLIENTS_LOAD_S", "300"))
SLACK_S = 120
MAX_GROWTH_BYTES = 32 << 20  # of a process under minutes of load, once it is warm
PYTHON = os.environ.get("QUIRE_CLIENTS_PYTHON", sys.executable)


@pytest.fixture
def served(shared_server: Served) -> Served:
    return shared_server


@pytest.fixture(scope="module")
def client(shared_server: Served) -> Iterator[openai.OpenAI]:
    with shared_server.client() as made:
        yield made


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **{"timeout": 110} | options)


def need(package: str) -> None:
    """Skip the test where the foreign package is missing."""
    done = run([PYTHON, "-c", f"import importlib.util as u, sys; sys.exit(not u.find_spec({package!r}))"])
    if done.returncode != 0:
        pytest.skip(f"{package} is needed: pip install -e '.[clients]', or QUIRE_CLIENTS_PYTHON")


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


@pytest.mark.slow
def test_openai_for_node_runs_the_same_scenarios(served: Served, tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node and npm are needed: apt-get install nodejs npm")
    installed = run([npm, "install", "--no-audit", "--no-fund", "openai"], cwd=tmp_path)
    if installed.returncode != 0:
        pytest.skip(f"npm cannot install openai: {installed.stderr[-300:]}")
    done = run([node, str(HERE / "scenarios.mjs"), f"{served.url}/v1", served.api_key], cwd=tmp_path)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in lines if not line["ok"]] == []
    assert {line["name"] for line in lines} == set(SCENARIOS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_openai_for_python_1_runs_the_same_scenarios(served: Served, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", str(tmp_path)])
    python = str(tmp_path / "bin" / "python")
    installed = run([python, "-m", "pip", "install", "--quiet", "openai<2"])
    if installed.returncode != 0:
        pytest.skip(f"pip cannot install openai<2: {installed.stderr[-300:]}")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run([python, str(HERE / "scenarios.py"), f"{served.url}/v1", served.api_key], env=env)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in lines if not line["ok"]] == []
    assert len(lines) > 30
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_guidellm_measures_a_server(served: Served, tmp_path: Path) -> None:
    """Its tokenizer is the model's own, from the package; nothing is downloaded."""
    need("guidellm")
    from quire.frontend.models.model_folder import pocket_folder

    backend = f"kind=openai_http,target={served.url},model=pocket,api_key={served.api_key}"
    command = [str(Path(PYTHON).parent / "guidellm"), "run", "--backend", backend]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={pocket_folder()}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=16"]
    command += ["--output", "kind=json,path=benchmarks.json"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (measured,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert totals["errored"] == 0
    assert totals["successful"] >= 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "script", "path"),
    [
        ("langchain_openai", "langchain_chat.py", "/v1"),
        ("litellm", "litellm_chat.py", "/v1"),
        ("anthropic", "anthropic_messages.py", ""),
        ("pydantic_ai", "pydantic_agent.py", "/v1"),
        ("langchain_openai", "langchain_vectors.py", "/v1"),
        ("instructor", "instructor_forms.py", "/v1"),
        ("llama_index.llms.openai_like", "llama_index_chat.py", "/v1"),
        ("llama_index.embeddings.openai_like", "llama_index_vectors.py", "/v1"),
        ("llama_index.embeddings.text_embeddings_inference", "tei_vectors.py", ""),
        ("cohere", "cohere_vectors.py", ""),
    ],
)
def test_a_client_library_finds_what_it_expects(served: Served, package: str, script: str, path: str) -> None:
    need(package)
    # litellm would fetch a table of prices.
    env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = run([PYTHON, str(HERE / script), served.url + path, served.api_key], env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(LOAD_S + SLACK_S)
def test_schemathesis_finds_no_error_over_the_whole_document(served: Served, tmp_path: Path) -> None:
    need("schemathesis")
    command = [str(Path(PYTHON).parent / "schemathesis"), "run", f"{served.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {served.api_key}", "--max-time", str(LOAD_S)]
    command += ["--workers", "2", "--request-timeout", "60", "--continue-on-failure"]
    command += ["--exclude-path", "/stats/stream"]  # it has no end
    # More is checked than a schema can say, such as token ids of the model: valid by the schema, and refused.
    command += ["--exclude-checks", "positive_data_acceptance"]
    env = os.environ | {"SCHEMATHESIS_HOOKS": str(HERE / "schemathesis_hooks.py")}
    before = measure(served)
    done = run(command, env=env, cwd=tmp_path, timeout=LOAD_S + SLACK_S - 10)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    check_growth(served, before)


@pytest.mark.slow
@pytest.mark.timeout(LOAD_S + SLACK_S)
def test_locust_fails_no_request(tmp_path: Path) -> None:
    need("locust")
    served = Served()
    before = measure(served)
    command = [PYTHON, "-m", "locust", "-f", str(HERE / "locustfile.py"), "--headless", "--host", served.url]
    command += ["--users", "50", "--spawn-rate", "25", "--run-time", f"{LOAD_S}s", "--stop-timeout", "30"]
    command += ["--only-summary", "--exit-code-on-error", "1"]
    done = run(command, cwd=tmp_path, timeout=LOAD_S + SLACK_S - 10)
    print(done.stderr[-4000:])
    assert done.returncode == 0, done.stderr
    check_growth(served, before)
    assert served.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_thousand_streams_at_once_end_well() -> None:
    served = Served()
    command = [sys.executable, str(HERE / "many_streams.py"), str(served.port), "1000", "none"]
    run(command, timeout=330)  # warm: buffers of a thousand connections stay allocated
    before = measure(served)
    done = run(command, timeout=330)
    print(done.stdout)
    line = json.loads(done.stdout)
    assert (line["good"], line["errors"]) == (1000, {})
    assert line["texts"] == 50
    check_growth(served, before)
    assert served.stop() == 0
