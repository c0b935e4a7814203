"""Who sees and ends what over HTTP: every route, tried by each kind of caller."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from openai_fakes import CHAT, AsgiClient, FakeLLM, chat, make_stats
from quire.frontend.http.app import create_app
from quire.frontend.http.bodies.openapi import Routes
from quire.frontend.http.caller import Caller
from quire.frontend.http.connections.auth import hash_key
from quire.frontend.http.engines.served_models import ServedModels
from quire.frontend.http.observe.live import EncodedSnapshot
from quire.frontend.http.options import ServerOptions
from quire.ipc.protocol.engine_views import StalledRequest
from quire.ipc.protocol.rights import METHODS, ROUTES, Reach, Standing
from top_fakes import make_request, make_snapshot

KEYED = ServerOptions(
    api_key_hashes=tuple(map(hash_key, ("one", "two"))), enable_tokenizer_info_endpoint=True, stall_s=1.0
)
KEYLESS = ServerOptions(server_id="here", enable_tokenizer_info_endpoint=True, stall_s=1.0)
ONE, TWO = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
TENANTS = {
    "one": hash_key("one")[:16],
    "two": hash_key("two")[:16],
    "local": "here/local",
    "far": "here/10.0.0.9",
}
OTHERS = ["there/local", "10.0.0.9", "127.0.0.1", "", "tcp:" + 40 * "k" + "/", "here/10.0.0.10"]


def show_requests(llm: FakeLLM) -> None:
    """An engine with a request of everybody, whose id is 'secret of ' and its tenant."""
    owners = [*TENANTS.values(), *OTHERS]
    views = [make_request(f"secret of {owner}", owner=owner, client=f"client of {owner}") for owner in owners]
    stall = StalledRequest("secret of stalled", "queued", 9.0, "nobody's tenant")
    stats = make_stats()
    stats = replace(stats, stall=stall, num_running=len(views))
    llm.answered_snapshot = make_snapshot(requests=views, stats=stats, num_hidden_requests=3)
    llm.answered_stats = stats


def list_routes() -> list[tuple[str, str]]:
    """Method and path of all."""
    models = ServedModels.of_one(FakeLLM(), KEYED)  # type: ignore[arg-type]
    app = create_app(models)
    return sorted((method, route.path) for route in app.routes.routes for method in route.methods or ())


def test_every_route_has_its_row_and_every_row_its_route() -> None:
    assert {path for _, path in list_routes()} == set(ROUTES)


def test_every_method_of_grpc_has_its_row() -> None:
    pytest.importorskip("grpc")
    from quire.frontend.grpc.engine_service import EngineService, HealthService

    services = [EngineService(None), HealthService(None)]  # type: ignore[arg-type]
    assert {f"/{service.name}/{name}" for service in services for name in service.methods} == set(METHODS)


def test_a_route_without_a_row_cannot_be_added() -> None:
    async def endpoint() -> None: ...

    with pytest.raises(AssertionError, match="/new has no row"):
        Routes().add_page("/new", endpoint)  # type: ignore[arg-type]


async def ask(client: AsgiClient, method: str, path: str, **headers: str) -> tuple[int, str]:
    path = path.replace("{model:path}", "fake").replace("{response_id}", "resp-" + 34 * "0")
    if path == "/stats/stream":
        return 0, ""  # has no end; below
    if path == "/metrics":
        return 0, ""  # of a real engine's counts: tests/frontend/http/observe/test_metrics.py
    body = json.dumps({"request_ids": ["secret"], **chat()}).encode() if method == "POST" else b""
    answer = await client.call(method, path, body, {"content_type": "application/json", **headers})
    return answer.status, answer.body.decode(errors="replace")


@pytest.mark.app(options=KEYED)
@pytest.mark.parametrize(("method", "path"), list_routes())
async def test_a_route_shows_no_key_what_is_not_its_own(
    method: str, path: str, llm: FakeLLM, client: AsgiClient
) -> None:
    show_requests(llm)
    status, text = await ask(client, method, path)
    assert (status == 401) == (ROUTES[path].find(Standing.STRANGER) is Reach.NONE) or status == 0
    assert "secret" not in text
    _, text = await ask(client, method, path, **ONE)
    assert text.count("secret of") == (path == "/stats")
    assert (f"secret of {TENANTS['one']}" in text) == (path == "/stats")


@pytest.mark.app(options=KEYLESS)
@pytest.mark.parametrize(("method", "path"), list_routes())
async def test_a_route_shows_no_address_what_is_not_its_own(
    method: str, path: str, llm: FakeLLM, client: AsgiClient
) -> None:
    show_requests(llm)
    for address, name in (("127.0.0.1", "local"), ("::1", "local"), ("", "local"), ("10.0.0.9", "far")):
        _, text = await ask(client.at(address), method, path, x_forwarded_for="10.0.0.10")
        assert text.count("secret of") == (path == "/stats")
        assert (f"secret of {TENANTS[name]}" in text) == (path == "/stats")


@pytest.mark.app(options=KEYED)
async def test_live_views_count_what_they_do_not_show(llm: FakeLLM, client: AsgiClient) -> None:
    show_requests(llm)
    shown = (await client.get("/stats", **ONE)).json
    [request] = shown["requests"]
    assert (request["request_id"], request["owner"]) == (f"secret of {TENANTS['one']}", "")
    assert shown["num_hidden_requests"] == 3 + len(TENANTS) + len(OTHERS) - 1
    assert shown["stats"]["num_running"] == len(TENANTS) + len(OTHERS)
    assert {client["name"] for client in shown["clients"]} <= {request["client"]}


def test_a_stream_of_live_views_shows_each_viewer_its_own() -> None:
    views = [make_request(f"secret of {owner}", owner=owner) for owner in TENANTS.values()]
    shown = EncodedSnapshot(make_snapshot(requests=views))
    for caller in (Caller(hash_key("one")), Caller(server="here").at("::1"), Caller(hash_key("two"))):
        events = [shown.encode(caller), shown.encode(caller)]
        assert events[0] is events[1]
        assert events[0].count(b"secret of") == 1
        assert f"secret of {caller.tenant}".encode() in events[0]


@pytest.mark.app(options=KEYLESS)
async def test_aborts_end_what_the_address_may_see_and_no_more(llm: FakeLLM, client: AsgiClient) -> None:
    for address in ("127.0.0.1", "::1", "10.0.0.9"):
        await client.at(address).post("/abort_requests", {"request_ids": ["r"]}, x_forwarded_for="1.1.1.1")
    assert [tenant for _, tenant in llm.named_aborts] == ["here/local", "here/local", "here/10.0.0.9"]


@pytest.mark.app(options=KEYED)
async def test_a_stall_names_its_request_to_its_own_caller_only(llm: FakeLLM, client: AsgiClient) -> None:
    stall = StalledRequest("mine", "queued", 9.0, TENANTS["one"])
    llm.answered_stats = replace(make_stats(), stall=stall)
    told = [(await client.get("/health", **key)).json for key in (ONE, TWO, {})]
    assert [one.get("request_id", "") for one in told] == ["mine", "", ""]
    assert {one["status"] for one in told} == {"stalled"}


@pytest.mark.app(options=KEYLESS)
async def test_a_keyless_callers_responses_are_its_own_by_address_and_the_404_is_that_of_none(
    client: AsgiClient,
) -> None:
    made = (await client.post("/v1/responses", {"input": "Hi"})).json
    missing = made["id"][:5] + 32 * "0" + made["id"][-2:]
    far = client.at("10.0.0.9")
    for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answers = [
            await far.call(method, f"/v1/responses/{one}{tail}", b"", {}) for one in (made["id"], missing)
        ]
        assert [one.status for one in answers] == [404, 404]
        theirs, none = (one.body.decode() for one in answers)
        assert theirs.replace(made["id"], "ID") == none.replace(missing, "ID")
    assert (await client.at("::1").get(f"/v1/responses/{made['id']}")).json == made


@pytest.mark.app(options=KEYED)
async def test_what_a_body_says_of_shares_is_refused_and_never_passed_on(
    llm: FakeLLM, client: AsgiClient
) -> None:
    for field in ("tenant", "weight", "num_attempts", "is_resumed", "age_s", "arrival_time", "names"):
        assert (await client.post(CHAT, chat(**{field: 5}), **ONE)).status == 400, field
    await client.post(CHAT, chat(), **ONE)
    assert llm.calls[-1].options.tenant == TENANTS["one"]


def test_callers_share_cached_prefixes_with_none_but_themselves() -> None:
    def salt(caller: Caller, said: str | None = None) -> str:
        return caller.make_options(SimpleNamespace(cache_salt=said)).cache_salt

    far = Caller(server="s").at("10.0.0.1")
    others = [
        Caller(server="s").at("10.0.0.2"),
        Caller(server="another").at("10.0.0.1"),
        Caller(server="s").at("::1"),
        Caller(hash_key("one"), server="s").at("10.0.0.1"),
        Caller(hash_key("two"), server="s").at("10.0.0.1"),
    ]
    salts = [salt(one) for one in (far, *others)]
    assert len(set(salts)) == len(salts)
    assert salt(far, "x") not in (salt(far), salt(far, "y"), "x")
    assert salt(far) == salt(Caller(server="s").at("10.0.0.1"))
    assert salt(others[2], "x") == salt(Caller(server="another").at("127.0.0.1"), "x") == "x"


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "local"),
        ("127.9.9.9", "local"),
        ("::ffff:127.0.0.1", "local"),
        ("::1", "local"),
        ("", "local"),
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2::3", "2001:0db8:0001:0002"),
        ("2001:db8:1:2:ffff::9", "2001:0db8:0001:0002"),
        ("fe80::1%eth0", "fe80:0000:0000:0000"),
    ],
)
def test_a_caller_without_a_key_is_one_by_its_address(host: str, address: str) -> None:
    assert Caller(server="s").at(host).tenant == f"s/{address}"
    assert Caller("k" * 64, server="s").at(host).tenant == "k" * 16
