"""Clients of other machines at a core: what they may say, what is believed of it, what they are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fakes import FakeEngine, make_config, make_request
from msgspec.structs import replace
from quire.core.clients.client_registry import ClientRegistry, GroupRoster
from quire.core.clients.origin import to_remote_identity
from quire.core.network import remote_clients
from quire.core.network.remote_clients import RemoteClients
from quire.core.network.request_memory import RequestMemory
from quire.core.scheduling.request import Request
from quire.core.stats.engine_facts import StartupClock, make_engine_facts
from quire.ipc.errors import ProtocolError
from quire.ipc.files.file_identity import FileStamp, NotedFiles
from quire.ipc.network.keys import ClientGrant
from quire.ipc.params.request_options import RequestKeywords, RequestOptions
from quire.ipc.protocol.engine_views import EngineSnapshot
from quire.ipc.protocol.messages import (
    MESSAGE_TYPES,
    PROTOCOL_VERSION,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequests,
    EngineDead,
    EngineRoster,
    FinishReason,
    FrontendCounts,
    Goodbye,
    Hello,
    Refusal,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    Welcome,
)
from quire.ipc.protocol.prefix_digest import hash_prefixes
from quire.ipc.protocol.rights import (
    MESSAGES,
    REQUEST_OPTIONS,
    UTILITIES,
    Reach,
    Standing,
)
from quire.ipc.protocol.step import WorkerReady
from quire.ipc.spec.config import SchedulerConfig

KEYS = {name: name.encode() * 40 for name in "ab"}
ONE, OTHER = (to_remote_identity(b"socket", key) for key in KEYS.values())
ONE_AGAIN = to_remote_identity(b"another socket", KEYS["a"])
LOCAL, OWNER = b"local", b"the supervisor's link"
CLIENTS = {Standing.OWNER: OWNER, Standing.LOCAL: LOCAL, Standing.NETWORK: ONE}


class Core:
    """A core with its registry: what clients of all kinds say to it, and what it answers."""

    def __init__(
        self,
        scheduler: SchedulerConfig | None = None,
        memory: RequestMemory | None = None,
        **grants: ClientGrant,
    ) -> None:
        config = make_config(scheduler=scheduler or SchedulerConfig(max_num_seqs=8))
        self.engine = FakeEngine(config, 64)
        self.engine.clock.now = 1000.0
        self.sent: list[tuple[bytes, msgspec.Struct]] = []
        group = GroupRoster(0, None, OWNER)
        self.registry = ClientRegistry("epoch", 0.0, self._send, clock=lambda: 0.0, group=group)
        by_key = {KEYS[name]: grant for name, grant in grants.items()}
        self.memory = memory or RequestMemory()
        clients = RemoteClients(lambda key: by_key.get(key, ClientGrant()), self.memory)
        self.registry.find_remote_origin = clients.find_origin
        facts = make_engine_facts(config, WorkerReady(64, "fake", []), {}, StartupClock("start", 0.0))
        self.registry.open(self.engine.core, facts)
        self.engine.deliver = self.registry.deliver  # type: ignore[method-assign]
        for client in (OWNER, LOCAL, ONE, OTHER):
            self.registry.take(client, hello())

    def _send(self, identity: bytes, message: msgspec.Struct) -> bool:
        self.sent.append((identity, message))
        return True

    def add(self, client: bytes, request_id: str, tokens: list[int], **fields: object) -> None:
        options = {name: fields.pop(name) for name in REQUEST_OPTIONS if name in fields}
        request = make_request(request_id, tokens, max_tokens=50, **options)
        self.registry.take(client, replace(request, **fields))

    def call(self, client: bytes, method: UtilityMethod) -> UtilityResult:
        self.sent.clear()
        self.registry.take(client, UtilityCall(1, method))
        self.registry.deliver()
        [result] = [one for to, one in self.sent if to == client and isinstance(one, UtilityResult)]
        return result

    @property
    def live(self) -> set[str]:
        return set(self.engine.requests)

    def find(self, request_id: str) -> Request:
        return self.engine.requests[request_id]


def hello(weight: float = 1.0) -> Hello:
    return Hello(PROTOCOL_VERSION, "test", 1, weight)


def look(core: Core, client: bytes) -> EngineSnapshot:
    snapshot = core.call(client, UtilityMethod.SNAPSHOT).snapshot
    assert snapshot is not None
    return snapshot


def make_message(kind: type[msgspec.Struct]) -> msgspec.Struct:
    request = make_request("new", [1], max_tokens=2)
    said = {
        Hello: hello(),
        EngineCoreRequest: request,
        EngineCoreRequests: EngineCoreRequests([request]),
        AbortRequests: AbortRequests(["r"]),
        UtilityCall: UtilityCall(1, UtilityMethod.PING),
        EngineRoster: EngineRoster([]),
    }
    if kind in said or kind in (Goodbye, FrontendCounts):
        return said.get(kind) or kind()
    # Of the engine's own words no field is looked at.
    return kind(*[None for _ in kind.__struct_fields__])


def test_an_option_without_a_row_is_taken_from_no_network_client(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core()
    core.add(ONE, "with", [1], timeout_s=5.0)
    rows = {name: row for name, row in REQUEST_OPTIONS.items() if name != "timeout_s"}
    monkeypatch.setattr(remote_clients, "REQUEST_OPTIONS", rows)
    core.registry.take(ONE, make_request("without", [1], max_tokens=50, timeout_s=5.0))
    assert [core.find(name).options.timeout_s for name in ("with", "without")] == [5.0, None]


def test_every_message_call_and_field_has_its_row() -> None:
    assert set(MESSAGES) == {one for kind, one in MESSAGE_TYPES.items() if kind < b"\x11"} | {EngineRoster}
    assert set(UTILITIES) == set(UtilityMethod)
    assert (
        list(REQUEST_OPTIONS)
        == list(RequestOptions.__struct_fields__)
        == list(RequestKeywords.__annotations__)
    )


@pytest.mark.parametrize("standing", CLIENTS)
@pytest.mark.parametrize("kind", MESSAGE_TYPES.values())
def test_a_message_is_taken_from_whom_its_row_names(kind: type[msgspec.Struct], standing: Standing) -> None:
    core = Core()
    if kind not in MESSAGES or MESSAGES[kind].find(standing) is Reach.NONE:
        with pytest.raises(ProtocolError, match=f"{kind.__name__} is (taken from|not for)"):
            core.registry.take(CLIENTS[standing], make_message(kind))
    else:
        core.registry.take(CLIENTS[standing], make_message(kind))


@pytest.mark.parametrize("standing", CLIENTS)
@pytest.mark.parametrize("method", UTILITIES)
def test_a_call_is_answered_as_its_row_says(method: UtilityMethod, standing: Standing) -> None:
    core = Core()
    core.call(LOCAL, UtilityMethod.DIGEST)
    for client, secret in ((LOCAL, "local-secret"), (OTHER, "other-secret"), (ONE, "own")):
        core.add(client, secret, list(range(1, 40)), names=[f"name of {secret}"], tenant=f"{secret} tenant")
    core.engine.turn()
    result = core.call(CLIENTS[standing], method)
    text = msgspec.json.encode(result).decode()
    reach = UTILITIES[method].find(standing)
    if reach is Reach.NONE:
        assert "only for clients on the engine's machine" in (result.error or "")
    if reach < Reach.ALL:
        assert "secret" not in text
    elif method is UtilityMethod.SNAPSHOT:
        assert "local-secret" in text
        assert "other-secret" in text
    if method is UtilityMethod.SNAPSHOT and standing is Standing.NETWORK:
        assert '"own"' in text
        assert result.snapshot is not None
        assert result.snapshot.num_hidden_requests == 2
        assert len(result.snapshot.clients) == 1


REPLACED: dict[str, tuple[object, Callable[[Request], bool]]] = {
    "arrival_time": (5.0, lambda live: live.order[1] == 1000.0),
    "age_s": (500.0, lambda live: live.order[1] == 1000.0),
    "priority": (-9, lambda live: live.order[0] == 0),
    "cache_salt": (
        "salt",
        lambda live: len(live.options.cache_salt) > 128 and live.options.cache_salt.endswith("salt"),
    ),
    "tenant": ("local tenant", lambda live: live.tenant.name == "tcp:" + 40 * "a" + "/"),
    "num_attempts": (5, lambda live: live.num_attempts == 0),
}


# What a client of the network decides about itself and its own requests. Each new field has to be weighed.
TAKEN = {
    *("protocol_version", "client_kind", "pid", "number"),  # of Hello: never the supervisor's kind
    *("request_id", "prompt_token_ids", "sampling_params", "eos_token_ids", "output_token_ids"),
    *("token_lists", "is_resumed", "grammar", "extra_args", "purpose", "pooling_params"),
    *("type_start", "num_sequences", "is_continued"),
    *(name for name, right in REQUEST_OPTIONS.items() if right.is_taken),
}


def test_each_field_is_taken_or_replaced() -> None:
    said = {*Hello.__struct_fields__, *EngineCoreRequest.__struct_fields__, *RequestOptions.__struct_fields__}
    assert said == TAKEN | REPLACED.keys() | {"weight", "options"}
    assert TAKEN.isdisjoint(REPLACED)


@pytest.mark.parametrize("name", REPLACED)
def test_what_a_client_of_the_network_says_does_not_decide(name: str) -> None:
    core = Core(SchedulerConfig(max_num_seqs=1, policy="priority"))
    value, holds = REPLACED[name]
    core.add(ONE, "r", [1, 2], **{"arrival_time": 5.0, name: value})
    assert holds(core.find("r"))
    core.add(LOCAL, "l", [1, 2], **{"arrival_time": 5.0, name: value})
    assert not holds(core.find("l"))


def test_a_weight_and_a_priority_are_the_keys() -> None:
    core = Core(a=ClientGrant("a", weight=3.0, priority=-2))
    for client, request_id in ((ONE, "one"), (OTHER, "other"), (LOCAL, "local")):
        core.registry.take(client, hello(1000.0))
        core.add(client, request_id, [1], priority=-5)
    assert [core.find(name).tenant.weight for name in ("one", "other", "local")] == [3.0, 1.0, 1000.0]
    assert sorted(one.weight for one in look(core, LOCAL).clients) == [1.0, 1.0, 3.0, 1000.0]


def test_all_connections_of_a_key_are_one_tenant_whatever_they_say() -> None:
    core = Core(b=ClientGrant("b", may_name_tenants=True))
    core.registry.take(ONE_AGAIN, hello())
    for place, client in enumerate([ONE, ONE, ONE_AGAIN]):
        core.add(client, f"a{place}", [1], tenant=f"t{place}")
    assert len({id(core.find(f"a{place}").tenant) for place in range(3)}) == 1
    core.add(OTHER, "b0", [1], tenant="t0")
    core.add(OTHER, "b1", [1], tenant="t1")
    core.add(LOCAL, "l0", [1], tenant="t0")
    forged = "tcp:" + 40 * "b" + "/"  # another key's own name
    core.add(ONE, "thief", [1], tenant=f"{forged}t0", cache_salt="x" * 128)
    names = [core.find(name).tenant.name for name in ("b0", "b1", "l0", "a0")]
    assert len(set(names)) == 4
    assert core.find("thief").tenant is core.find("a0").tenant
    core.registry.take(ONE, AbortRequests([], ["b0"], f"{forged}t0"))
    assert "b0" in core.live
    assert core.find("thief").options.cache_salt != core.find("b0").options.cache_salt


def test_names_end_the_keys_own_requests_and_no_others() -> None:
    core = Core()
    core.registry.take(ONE_AGAIN, hello())
    core.add(LOCAL, "local", [1], names=["shared"], tenant="x")
    core.add(OTHER, "other", [1], names=["shared"], tenant="x")
    core.add(ONE, "one", [1], names=["shared"], tenant="x")
    core.add(ONE, "two", [1], names=["shared"], tenant="y")
    core.registry.take(ONE_AGAIN, AbortRequests(["local", "other"], ["shared", "local", "other"], "x"))
    assert core.live == {"local", "other", "two"}
    core.registry.take(ONE_AGAIN, AbortRequests([], ["shared"]))
    assert core.live == {"local", "other"}
    core.registry.take(LOCAL, AbortRequests([], ["shared"], "x"))  # an HTTP server's: of its own tenant
    assert core.live == {"other"}
    core.registry.take(LOCAL, AbortRequests([], ["shared"]))
    assert core.live == set()


def test_a_client_of_the_network_counts_no_more_than_it_was_served() -> None:
    core = Core()

    def count(client: bytes, number: int) -> tuple[int, int]:
        core.registry.take(client, FrontendCounts(number, number))
        metrics = core.call(LOCAL, UtilityMethod.METRICS).metrics
        assert metrics is not None
        return metrics.tool_parse_errors_total, metrics.reasoning_tokens_total

    assert count(ONE, 2**31 - 1) == (0, 0)
    core.add(ONE, "r", [1])
    core.engine.run()
    assert count(OTHER, 2**31 - 1) == (0, 0)
    assert count(ONE, 30) == (30, 30)
    assert [count(ONE, 2**31 - 1) for _ in range(2)] == [(50, 50)] * 2
    assert count(LOCAL, 1000) == (1050, 1050)


CAUSES = [
    "hush.gguf='/home/a user/secret/hush.gguf': it is not the file that it was",
    'File "/srv/secret/models/hush.gguf", line 3, in f',
    "no such file: /srv/secret/hush.gguf, ~/secret/hush.gguf; 3 tokens/s of http://host/secret-less/hush.gguf",
]


@pytest.mark.parametrize("cause", CAUSES)
def test_a_client_of_the_network_is_told_no_folder_of_this_machine(cause: str) -> None:
    core = Core()
    core.registry.deliver()
    failed = EngineCoreOutput("r", 0, [], FinishReason.ERROR, error=cause)
    said: list[msgspec.Struct] = [
        Refusal(cause),
        EngineDead(cause),
        UtilityResult(1, cause),
        EngineCoreOutputs([EngineCoreOutput("q", 0, [1]), failed]),
    ]
    for message in said:
        for client in (ONE, LOCAL, b"no client", to_remote_identity(b"none either", KEYS["b"])):
            core.sent.clear()
            core.registry.reply(client, message)
            core.registry.deliver()
            [(_, told)] = core.sent
            text = msgspec.json.encode(told).decode()
            assert ("secret/" in text) == (not client.startswith(b"tcp:")), text
            assert "hush.gguf" in text
            assert ("http://host/" in text) == ("http://host/" in cause)


def test_facts_say_no_folder_and_no_stamp_of_this_machines_files() -> None:
    core = Core()
    assert core.registry.facts is not None
    path = "/srv/secret/hush.gguf"
    noted = NotedFiles(weights={}, model={"config.json": FileStamp(1, 2, 3, 4)}, tokenizer={})
    core.registry.facts = replace(
        core.registry.facts, model=path, tokenizer=path, weight_file=path, noted=noted
    )
    for client in (ONE, LOCAL):
        core.sent.clear()
        core.registry.take(client, hello())
        core.registry.deliver()
        [welcome] = [one for to, one in core.sent if to == client and isinstance(one, Welcome)]
        assert ("secret" in repr(welcome)) == (client is LOCAL)
        assert (welcome.facts.noted is None) == (client is ONE)
        assert "hush.gguf" in welcome.facts.weight_file


def test_a_digest_names_what_its_readers_key_has_asked() -> None:
    core = Core()
    for client in (LOCAL, ONE, OTHER):
        core.call(client, UtilityMethod.DIGEST)
    tokens = list(range(1, 40))
    core.add(ONE, "mine", tokens)
    core.add(LOCAL, "local", [7, *tokens])
    core.engine.run()
    block_size = core.engine.config.cache.block_size
    mine, local = (
        hash_prefixes(make_request("r", one).prompt_token_ids, "", block_size, [1])[0]
        for one in (tokens, [7, *tokens])
    )
    for client, has in ((ONE, [mine]), (LOCAL, [local]), (OTHER, [])):
        digest = core.call(client, UtilityMethod.DIGEST).digest
        assert digest is not None
        told = [digest.prefixes[at : at + 8] for at in range(0, len(digest.prefixes), 8)]
        assert [name for name in (mine, local) if name.to_bytes(8, "little") in told] == has


# -- honest clients, whose core is lost


def end_core(core: Core, memory_path: Path) -> Core:
    """Another core after one that was killed."""
    return Core(core.engine.config.scheduler, RequestMemory(str(memory_path), clock=lambda: 0.0))


def test_a_request_keeps_its_place_over_a_lost_core_and_a_lost_connection(tmp_path: Path) -> None:
    path = tmp_path / "live"
    one_row = SchedulerConfig(max_num_seqs=1)
    core = Core(one_row, RequestMemory(str(path)))
    core.add(ONE, "slow", [1], is_resumed=False)
    core.engine.clock.now = 1100.0
    core = end_core(core, path)
    core.engine.clock.now = 1200.0
    core.add(ONE, "slow", [1], is_resumed=True, age_s=900.0)
    assert core.find("slow").order[1] == 1000.0
    core.registry.take(ONE, hello())  # its connection was lost
    assert core.live == set()
    core.add(ONE, "slow", [1], is_resumed=True, age_s=900.0)
    core.add(OTHER, "slow 2", [1], is_resumed=True, age_s=900.0)
    assert core.find("slow").order[1] == 1000.0
    assert core.find("slow 2").order[1] == 1200.0


def test_a_place_that_was_left_for_a_minute_is_lost() -> None:
    now = 0.0
    core = Core(memory=RequestMemory(clock=lambda: now))
    for name in ("soon", "late"):
        core.add(ONE, name, [1])
    core.registry.take(ONE, hello())
    core.engine.clock.now = 5000.0
    now = 59.0
    core.add(ONE, "soon", [1])
    now = 61.0
    core.add(ONE, "late", [1])
    assert [core.find(name).order[1] for name in ("soon", "late")] == [1059.0, 5000.0]


def test_places_cannot_be_saved_up() -> None:
    now = 0.0
    core = Core(SchedulerConfig(max_num_seqs=1), RequestMemory(clock=lambda: now))
    for _ in range(20):  # each time within the minute that a place is kept
        core.add(ONE, "ticket", [1])
        core.registry.take(ONE, hello())
        now += 50.0
        core.engine.clock.now += 50.0
    core.add(OTHER, "honest", [1])
    core.engine.clock.now += 1.0
    core.add(ONE, "ticket", [1])
    assert core.find("ticket").order[1] == 2000.0
    assert core.find("honest").order < core.find("ticket").order


def test_what_is_remembered_of_lost_requests_is_bounded() -> None:
    memory = RequestMemory(clock=lambda: 0.0)
    for number in range(5000):
        memory.add("scope", f"{number}", 1.0)
        memory.lose("scope", f"{number}")
    known = [memory.find("scope", f"{number}").arrival == 1.0 for number in range(5000)]
    assert known == [False] * (5000 - 4096) + [True] * 4096


def test_a_request_runs_alone_after_as_many_cores_as_it_was_live_in(tmp_path: Path) -> None:
    path = tmp_path / "live"
    core = Core(memory=RequestMemory(str(path)))
    seen: list[list[int]] = []
    for said in range(4):
        core.add(ONE, "poison", [1], num_attempts=said)
        core.add(ONE, f"liar {said}", [1], num_attempts=5)
        core.add(ONE, "well", [1], num_attempts=0)  # it has had a token since
        seen.append([core.find(name).num_attempts for name in ("poison", f"liar {said}", "well")])
        core = end_core(core, path)
    assert seen == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0]]
    core.add(OTHER, "poison", [1], num_attempts=5)
    assert core.find("poison").num_attempts == 0, "another key's is another"


def test_what_has_ended_is_forgotten_and_a_core_that_ends_as_it_should_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "live"
    core = Core(memory=RequestMemory(str(path)))
    core.add(ONE, "r", [1])
    core.registry.take(ONE, AbortRequests(["r"]))
    core.registry.deliver()
    core = end_core(core, path)
    core.add(ONE, "r", [1], num_attempts=5)
    assert core.find("r").num_attempts == 0
    core.registry.take(ONE, AbortRequests(["r"]))
    core.registry.deliver()
    core.add(ONE, "r", [1])
    core.memory.close()
    assert not path.exists()


def test_a_damaged_memory_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "live"
    path.write_bytes(b"\xff" * 100)
    memory = RequestMemory(str(path))
    memory.add("scope", "r", 1.0)
    memory = RequestMemory(str(tmp_path / "no folder" / "live"))
    memory.add("scope", "r", 1.0)
    memory.end("scope", "r")


def test_resumed_requests_of_the_network_have_twice_the_bound_and_no_more() -> None:
    core = Core(SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=2))
    for place in range(20):
        core.add(ONE, f"r{place}", [1], is_resumed=True)
        core.add(LOCAL, f"l{place}", [1], is_resumed=True)
    assert len([name for name in core.live if name.startswith("l")]) == 20
    assert len([name for name in core.live if name.startswith("r")]) < 7
