"""One address, two engines: requests go by their model, and an engine that is away fails its own only."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import pytest
from frontend_fakes import make_facts, make_stats
from openai_fakes import AsgiClient, FakeLLM, InlineText
from prometheus_client.parser import text_string_to_metric_families
from quire.frontend.http.app import create_app
from quire.frontend.http.connections.auth import ApiKeyMiddleware
from quire.frontend.http.engines import daemon_model
from quire.frontend.http.engines.daemon_model import DaemonModel, load_daemon_models
from quire.frontend.http.engines.served_models import ServedModel, ServedModels
from quire.frontend.http.engines.server_parts import ServerParts
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.serving import Reservation, Serving
from quire.frontend.models.model_folder import pocket_folder
from quire.ipc.errors import ConfigError, EngineDeadError, RequestFailedError
from quire.ipc.protocol.engine_views import EngineMetrics, StalledRequest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETIONS = "/v1/completions"


class Site:
    """An app over 'chat' of daemon 'one' and 'vectors' of daemon 'two', each with a FakeLLM."""

    def __init__(self) -> None:
        self.parts = ServerParts(ServerOptions())
        self.llms = {name: FakeLLM(served_model_name=name) for name in ("chat", "vectors")}
        daemons = (DaemonModel("one", "chat", 128), DaemonModel("two", "vectors", 128))
        self.models = ServedModels(self.parts, [ServedModel(known=known) for known in daemons])
        self.client = AsgiClient(ApiKeyMiddleware(create_app(self.models), ()))

    def arrive(self, name: str) -> Serving:
        """The daemon's engine is attached, with another FakeLLM if it has been there before."""
        model = self.models.find(name)
        serving = Serving(self.llms[name], self.parts)  # type: ignore[arg-type]
        serving._text = InlineText(self.llms[name].tokenizer)  # type: ignore[assignment]
        model.arrive(serving)
        return serving


@pytest.fixture
def site() -> Site:
    site = Site()
    for name in site.llms:
        site.arrive(name)
    return site


async def test_a_model_answers_by_the_name_that_it_is_asked_by(site: Site) -> None:
    site.llms["chat"] = FakeLLM(served_model_name="chat", served_model_aliases=("best",))
    site.arrive("chat")
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": "a"},
        "/v1/chat/completions": CHAT,
        "/v1/messages": CHAT | {"max_tokens": 4},
        "/v1/responses": {"input": "Hi"},
        "/api/chat": CHAT | {"stream": False},
    }
    for name in ("chat", "best"):
        for path, body in bodies.items():
            answer = await site.client.post(path, {"model": name} | body)
            assert (answer.status, answer.json["model"]) == (200, name)
        streamed = await site.client.post("/v1/chat/completions", CHAT | {"model": name, "stream": True})
        assert f'"model":"{name}"'.encode() in streamed.body
        assert (await site.client.get(f"/v1/models/{name}")).json["id"] == name
    listed = (await site.client.get("/v1/models")).json
    assert [card["id"] for card in listed["data"]] == ["chat", "best", "vectors"]
    tasks = ("embed", "score", "classify")
    site.llms["vectors"] = FakeLLM(
        served_model_name="vectors", served_model_aliases=("v",), tasks=tasks, embedding_size=8
    )
    site.arrive("vectors")
    bodies = {
        "/v1/embeddings": {"input": "a"},
        "/classify": {"input": "a"},
        "/score": {"text_1": "a", "text_2": "b"},
        "/v1/rerank": {"query": "a", "documents": ["b"]},
    }
    for path, body in bodies.items():
        assert (await site.client.post(path, {"model": "v"} | body)).json["model"] == "v"


@pytest.mark.parametrize(("body", "status"), [({}, 400), ({"model": "other"}, 404)])
async def test_a_request_that_names_no_model_or_another_is_told_which_there_are(
    site: Site, body: dict[str, Any], status: int
) -> None:
    for path in (COMPLETIONS, "/tokenize"):
        answer = await site.client.post(path, {"prompt": "a"} | body)
        assert (answer.status, answer.error["param"]) == (status, "model")
        assert "'chat', 'vectors'" in answer.error["message"]


async def test_a_request_that_names_no_model_goes_to_the_only_one_that_can_do_its_task(site: Site) -> None:
    facts = make_facts(served_model_name="vectors", tasks=("embed",), embedding_size=8, weights="int4")
    site.llms["vectors"].facts = facts
    site.arrive("vectors")
    answer = await site.client.post("/v1/chat/completions", CHAT)
    assert (answer.status, answer.json["model"]) == (200, "chat")
    assert (await site.client.get("/v1/models/vectors")).json["embedding_size"] == 8
    site.models.find("vectors").leave("it has ended")
    assert "'vectors' is away" in (await site.client.post("/embed", {"inputs": "a"})).error["message"]
    card = (await site.client.get("/v1/models/vectors")).json
    assert (card["tasks"], card["embedding_size"]) == (["embed"], 8)
    assert card["formats"] == "float32, int4 weights"
    site.arrive("vectors")
    answer = await site.client.post("/v1/completions", {"model": "vectors", "prompt": "a"})
    assert (answer.status, answer.error["code"]) == (400, "unsupported_task")


async def test_a_task_that_no_model_has_is_refused_with_what_each_can(site: Site) -> None:
    site.llms["vectors"].facts = make_facts(served_model_name="vectors", tasks=("embed", "score"))
    site.arrive("vectors")
    answer = await site.client.post("/classify", {"input": "a"})
    assert (answer.status, answer.error["code"]) == (400, "unsupported_task")
    assert "'chat' can generate; 'vectors' can embed, score" in answer.error["message"]
    site.models.models.append(ServedModel(known=DaemonModel("three", "starting")))
    assert (await site.client.post("/classify", {"input": "a"})).error["code"] == "missing_field"


async def test_an_engine_that_is_away_fails_its_own_requests_and_nobody_elses(site: Site) -> None:
    site.models.find("vectors").leave("the daemon 'two' has ended")
    for _ in range(2):
        answer = await site.client.post(COMPLETIONS, {"model": "vectors", "prompt": "a"})
        assert (answer.status, answer.error["code"]) == (503, "engine_away")
        assert "the model 'vectors' is away: the daemon 'two' has ended" in answer.error["message"]
    assert (await site.client.post(COMPLETIONS, {"model": "chat", "prompt": "a"})).status == 200
    assert (await site.client.get("/stats?model=vectors")).status == 503
    listed = (await site.client.get("/v1/models")).json["data"]
    assert [card["id"] for card in listed] == ["chat", "vectors"]
    site.arrive("vectors")
    assert (await site.client.post(COMPLETIONS, {"model": "vectors", "prompt": "a"})).status == 200


async def test_health_says_how_each_engine_is_and_fails_when_none_is_well(site: Site) -> None:
    async def ask(path: str) -> tuple[int, Any]:
        answer = await site.client.get(path)
        return answer.status, answer.json

    assert await ask("/ready") == (200, {"status": "ready", "models": {"chat": "ready", "vectors": "ready"}})
    stalled = StalledRequest("r-0", "queued", 99.0)
    site.llms["chat"].answered_stats = make_stats(stall=stalled)
    status, body = await ask("/health")
    assert (status, body["status"]) == (200, "degraded")
    assert body["models"]["chat"]["status"] == "stalled"
    assert body["models"]["vectors"] == {"status": "ready"}
    assert (await ask("/health?model=chat"))[0] == 503
    assert await ask("/health?model=vectors") == (200, {"status": "ready"})
    site.models.find("vectors").leave("it has ended")
    assert await ask("/ready") == (
        200,
        {"status": "degraded", "models": {"chat": "ready", "vectors": "away"}},
    )
    assert await ask("/ready?model=vectors") == (503, {"status": "away"})
    status, body = await ask("/health")
    assert (status, body["status"]) == (503, "stalled")
    assert body["models"]["vectors"] == {"status": "away", "stage": "it has ended"}
    site.models.find("chat").leave("it has ended")
    assert (await ask("/ready"))[0] == 503
    site.parts.drain()
    assert (await ask("/ready"))[1]["status"] == "draining"


async def test_each_engine_has_series_of_its_own_below_one_name(site: Site) -> None:
    async def count(number: int) -> dict[int, EngineMetrics]:
        stats = make_stats(num_running=number)
        return {0: EngineMetrics(stats=stats, histograms={}, finished_total={})}

    for number, llm in enumerate(site.llms.values()):
        llm.metrics_by_engine = lambda number=number: count(number)  # type: ignore[method-assign]
    text = (await site.client.get("/metrics")).body.decode()
    assert text.count("# TYPE quire:num_requests_running gauge") == 1
    assert read_series(text, "quire:num_requests_running") == {"chat": 0, "vectors": 1}
    assert read_series(text, "quire:engine_up") == {"chat": 1, "vectors": 1}

    async def fail() -> dict[int, EngineMetrics]:
        raise RequestFailedError("no answer")

    site.llms["vectors"].metrics_by_engine = fail  # type: ignore[method-assign]
    text = (await site.client.get("/metrics")).body.decode()
    assert read_series(text, "quire:num_requests_running") == {"chat": 0}
    assert read_series(text, "quire:engine_up") == {"chat": 1, "vectors": 0}


def read_series(text: str, name: str) -> dict[str, float]:
    """Model name -> value."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {sample.labels["model_name"]: sample.value for sample in families[name].samples}


async def test_an_abort_by_id_is_told_every_engine_that_is_here(site: Site) -> None:
    answer = await site.client.post("/abort_requests", {"request_ids": ["x"]})
    assert answer.status == 200
    assert [llm.named_aborts for llm in site.llms.values()] == [[(["x"], "/local")]] * 2
    site.llms["chat"].die(EngineDeadError("gone"))
    assert (await site.client.post("/abort_requests", {"request_ids": ["y"]})).status == 200
    assert site.llms["vectors"].named_aborts[-1] == (["y"], "/local")


async def test_a_kept_response_is_the_servers_and_is_cancelled_in_the_engine_that_runs_it(site: Site) -> None:
    first = (await site.client.post("/v1/responses", {"model": "chat", "input": "Hi"})).json
    assert (await site.client.get(f"/v1/responses/{first['id']}")).json["model"] == "chat"
    more = {"model": "vectors", "input": "And?", "previous_response_id": first["id"]}
    assert (await site.client.post("/v1/responses", more)).json["model"] == "vectors"
    vectors = site.llms["vectors"]
    vectors.gate.clear()
    running = asyncio.create_task(site.client.post("/v1/responses", more | {"stream": True}))
    await vectors.wait_for_calls(2)
    response_id = vectors.calls[-1].request_id
    assert (await site.client.post(f"/v1/responses/{response_id}/cancel", {})).status == 200
    assert vectors.aborted == {response_id}
    assert not site.llms["chat"].aborted
    await running


async def test_an_engines_places_are_its_own(site: Site) -> None:
    full = site.llms["chat"].facts.max_num_seqs + site.parts.options.max_waiting
    site.models.find("chat").serving.capacity.enter("all", Reservation("/local", full))
    refused = await site.client.post(COMPLETIONS, {"model": "chat", "prompt": "a"})
    assert refused.status == 429
    assert (await site.client.post(COMPLETIONS, {"model": "vectors", "prompt": "a"})).status == 200


class FakeEngine:
    """Of the daemon 'NAME-MODEL'."""

    def __init__(self, daemon: str, *_: Any, **__: Any) -> None:
        self.facts = FakeLLM(served_model_name=daemon.partition("-")[2]).facts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_daemons_that_serve_the_same_name_are_refused_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_model.LLMEngine, "attach", FakeEngine)
    monkeypatch.setattr(daemon_model, "find_starting_model", lambda _daemon: None)
    found = load_daemon_models(["a-x", "b-y"])
    root = str(pocket_folder())
    assert found == tuple(
        DaemonModel(f"{a}-{b}", b, 128, model=root, formats="float32") for a, b in (("a", "x"), ("b", "y"))
    )
    with pytest.raises(ConfigError, match=r"attach='a-x, b-x': .*: both 'x'"):
        load_daemon_models(["a-x", "b-x"])
    with pytest.raises(ConfigError, match="attach='a-x': expected each daemon once"):
        load_daemon_models(["a-x", "a-x"])


async def test_ollamas_clients_are_told_of_all_models_and_which_are_loaded(site: Site) -> None:
    site.models.find("vectors").leave("it has ended")
    listed = (await site.client.get("/api/tags")).json["models"]
    assert [model["name"] for model in listed] == ["chat:latest", "vectors:latest"]
    loaded = (await site.client.get("/api/ps")).json["models"]
    assert [model["name"] for model in loaded] == ["chat:latest"]
    answer = await site.client.post("/api/chat", CHAT | {"model": "chat:latest", "stream": False})
    assert (answer.status, answer.json["model"]) == (200, "chat:latest")
    away = await site.client.post("/api/chat", CHAT | {"model": "vectors"})
    assert (away.status, "it has ended" in away.json["error"]) == (503, True)
