"""Real text processes: the same ids, and models whose template or tokenizer has no end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_fakes import CHAT, AsgiClient, FakeLLM
from quire.frontend.http.app import create_app
from quire.frontend.http.connections.auth import ApiKeyMiddleware
from quire.frontend.http.engines.served_models import ServedModels
from quire.frontend.http.limits import Limits
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Serving
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.tokenizer import load_tokenizer
from server_fakes import OpenServer, read_marks

AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")
# The first word of a conversation says what the template does with it.
TEMPLATE = """{% set ask = messages[0].content %}
{% if ask == 'endless' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% elif ask == 'memory' %}{{ 'x' * 10 ** 10 }}
{% elif ask == 'number' %}{{ 9 ** ((ask | length) ** 12) }}
{% elif ask == 'deep' %}{% macro deep(n) %}{{ deep(n + 1) }}{% endmacro %}{{ deep(0) }}
{% else %}{{ ask }}{% endif %}"""
PATTERN = {"type": "Split", "pattern": {"Regex": "(b+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's folder with a template that does harm, and a pattern that does at many b's."""
    folder = tmp_path_factory.mktemp("hostile")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pocket_folder() / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"].insert(0, PATTERN)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def models(runner: asyncio.Runner, request: pytest.FixtureRequest) -> Iterator[ServedModels]:
    """The pocket model with text processes; the mark `text` says limits, and a fixture of another folder."""
    how = read_marks(request, "text")
    folder = request.getfixturevalue(how.pop("folder")) if "folder" in how else pocket_folder()
    llm = FakeLLM(tokenizer=str(folder), max_model_len=4096)
    llm.tokenizer = load_tokenizer(folder)
    models = ServedModels.of_one(llm, ServerOptions(limits=Limits(**how)))  # type: ignore[arg-type]
    models.only.open()

    async def close() -> None:
        models.close()
        assert models.only.text.pids == []

    yield models
    runner.run(close())


@pytest.fixture
def serving(models: ServedModels) -> Serving:
    return models.only


@pytest.fixture
def client(models: ServedModels) -> AsgiClient:
    return AsgiClient(ApiKeyMiddleware(create_app(models), ()))


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.text(folder="hostile_folder", max_render_s=0.2)
async def test_a_template_or_pattern_without_end_costs_its_own_request_a_400_with_the_number(
    client: AsgiClient,
) -> None:
    asked = {"memory": "2048 MiB", "number": "0.2 s", "b" * 60 + "a": "tokenize", "deep": "recursion"}
    answers = await asyncio.gather(
        *(client.post(CHAT, chat(text)) for text in asked), client.post(CHAT, chat("fine"))
    )
    assert [answer.status for answer in answers] == [400] * len(asked) + [200]
    for answer, number in zip(answers, asked.values(), strict=False):
        assert number in answer.error["message"]
        assert answer.error["param"] == "messages"
    plain = await client.post("/v1/completions", {"prompt": "b" * 60 + "a"})
    assert (plain.status, plain.error["param"]) == (400, "prompt")
    assert (await client.post(CHAT, chat("fine"))).status == 200


async def test_ids_are_those_of_the_template_and_the_tokenizer_short_and_long(
    client: AsgiClient, serving: Serving
) -> None:
    tokenizer = load_tokenizer(pocket_folder())
    template = tokenizer.chat_template
    assert isinstance(template, ChatTemplate)
    for text in ("Once upon", "Once upon a time. " * 2000):
        body = chat(text)
        ids = tokenizer.encode(template.render(body["messages"]), add_special_tokens=False)
        answer = await client.post("/tokenize", body | {"return_token_strs": True})
        assert (answer.json["tokens"], answer.json["count"]) == (ids, len(ids))
        assert answer.json["token_strs"] == [tokenizer.backend.id_to_token(one) for one in ids]
        plain = await client.post("/tokenize", {"prompt": text})
        assert plain.json["tokens"] == tokenizer.encode(text)
        back = await client.post("/detokenize", {"tokens": plain.json["tokens"]})
        assert back.json == {"prompt": text}
        assert len(serving.text.pids) == 1 + (len(text) > 1000)
    many = await client.post("/v1/completions", {"prompt": ["x" * 1500, "y" * 1500]})
    assert [choice["index"] for choice in many.json["choices"]] == [0, 1]
    long = await client.post("/v1/completions", {"prompt": "a b " * 9000})
    assert long.error["message"].startswith("prompt='")
    assert "tokens': expected at most 4095 (max_model_len=4096" in long.error["message"]
    assert long.error["code"] == "context_length_exceeded"


async def test_the_process_of_long_texts_leaves_the_processor_to_those_of_other_sessions(
    client: AsgiClient, serving: Serving
) -> None:
    assert (await client.post("/tokenize", {"prompt": "one " * 10_000})).status == 200
    pid = serving.text.pids[-1]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + 5)
    if AUTOGROUPS.exists() and AUTOGROUPS.read_text().strip() == "1":
        assert Path(f"/proc/{pid}/autogroup").read_text().split()[-2:] == ["nice", "5"]


async def test_a_killed_text_process_costs_nobody_a_request(client: AsgiClient, serving: Serving) -> None:
    assert (await client.post(CHAT, chat("Hi"))).status == 200
    (pid,) = serving.text.pids
    os.kill(pid, signal.SIGSTOP)  # so that the next ones are with it when it is killed
    asking = [asyncio.ensure_future(client.post(CHAT, chat("Hi"))) for _ in range(8)]
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    assert [answer.status for answer in await asyncio.gather(*asking)] == [200] * 8
    assert pid not in serving.text.pids


async def test_sigterm_is_heard_while_a_template_runs_without_end_and_nothing_is_left(
    hostile_folder: Path, open_server: OpenServer
) -> None:
    llm = FakeLLM(tokenizer=str(hostile_folder))
    llm.tokenizer = load_tokenizer(hostile_folder)
    running = await open_server(drain_timeout_s=0.1, llm=llm, has_text_processes=True)
    text = running.server._models.only.text
    asking = await running.peer.make_neighbour()
    await asking.post(CHAT, chat("endless"))
    while not text._short._sent:  # until a process has it
        assert await running.peer.ask_live()
    await running.stop()
    assert text.pids == []
    assert b"503" in (await asking.read_all())[:20]


@pytest.mark.text(max_render_s=0.5)
async def test_a_grammar_that_costs_too_much_is_one_refused_request(client: AsgiClient) -> None:
    rules = "\n".join(f"A{place}: A{place + 1} A{place + 1}" for place in range(30))
    costly = f'start: A0\n{rules}\nA30: "x"'

    def ask(grammar: str) -> Awaitable[Any]:
        body = {"prompt": "Hi", "structured_outputs": {"grammar": grammar}}
        return client.post("/v1/completions", body)

    bad, good = await asyncio.gather(ask(costly), ask('start: "a"+'))
    assert (bad.status, good.status) == (400, 200), (bad.body, good.body)
    # Which of the limits is met first depends on the machine.
    assert any(limit in bad.error["message"] for limit in ("max_render_s", "initial_lexer_fuel"))
    assert bad.error["param"].startswith("structured_outputs")


async def test_a_grammar_whose_first_token_takes_too_long_to_find_is_refused_before_it_runs(
    client: AsgiClient, serving: Serving
) -> None:
    """In the third power of its alternatives, with the model's tokens: single bytes make it cheap."""
    names = [f"x{number}" for number in range(500)]
    rules = ["start: z+", "z: " + "|".join(f"{name} z?" for name in names)]
    ambiguous = "\n".join([*rules, *(f"{name}: /[a-z ]/" for name in names)])

    def ask(grammar: str) -> Awaitable[Any]:
        body = {"prompt": "Hi", "structured_outputs": {"grammar": grammar}}
        return client.post("/v1/completions", body)

    assert (await ask('start: "a"+')).status == 200
    pids = serving.text.pids
    bad, good = await asyncio.gather(ask(ambiguous), ask('start: "b"+'))
    assert (bad.status, good.status) == (400, 200), (bad.body, good.body)
    assert "what has its first token found in 30 ms of processor time" in bad.error["message"]
    assert bad.error["param"] == "structured_outputs.grammar"
    assert serving.text.pids == pids
