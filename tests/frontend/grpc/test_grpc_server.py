"""The gRPC API over a scripted engine, by a client that was made of the .proto: answers, errors, the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from grpc_client import make_client, with_key
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai_fakes import FakeLLM
from quire.frontend.grpc.calls import CallHandler, find_address
from quire.frontend.grpc.engine_service import EngineService, HealthService
from quire.frontend.http.caller import Caller
from quire.frontend.http.connections.auth import hash_key
from quire.frontend.http.engines.served_models import ServedModels
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.stream import cancel_and_wait
from quire.ipc.errors import RequestFailedError
from quire.ipc.params.request_options import RequestOptions
from quire.ipc.params.sampling_params import RequestOutputKind
from server_fakes import RunningServer, Server, watch_drain

pb, stubs = make_client()
HEALTH = health_pb2.HealthCheckRequest()
GRPC = {"grpc_address": "127.0.0.1:0"}
pytestmark = pytest.mark.server(options=GRPC)


@asynccontextmanager
async def connect(server: Server, **options: int) -> AsyncIterator[grpc.aio.Channel]:
    assert server._grpc is not None
    settings = [(f"grpc.{name}", value) for name, value in options.items()]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server._grpc.port}", settings) as channel:
        yield channel


@pytest.fixture
def stub(runner: asyncio.Runner, server: Server) -> Iterator[Any]:
    """A client's."""
    channel = connect(server)
    yield stubs.QuireEngineStub(runner.run(channel.__aenter__()))
    runner.run(channel.__aexit__(None, None, None))


async def find_error(call: Any) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    """Status, text and trailing metadata of a call that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or "", dict(list(caught.value.trailing_metadata()))


async def read_rest(call: Any, pieces: list[Any] | None = None) -> list[Any]:
    """What comes until a stream ends, put into `pieces`."""
    pieces = [] if pieces is None else pieces
    while (piece := await call.read()) is not grpc.aio.EOF:
        pieces.append(piece)
    return pieces


async def test_a_text_is_answered_at_once_or_piece_by_piece(llm: FakeLLM, stub: Any) -> None:
    sampling = pb.SamplingParams(logprobs=1, prompt_logprobs=0, temperature=0.5)
    request = pb.GenerateRequest(text="Hi there", sampling_params=sampling, priority=-2, cache_salt="s")
    whole = await stub.Generate(request)
    pieces = [piece async for piece in stub.GenerateStream(request)]
    assert whole.outputs[0].text == "word word word "
    assert [piece.outputs[0].text for piece in pieces] == ["word "] * 3
    assert [piece.finished for piece in pieces] == [False, False, True]
    for last in (whole, pieces[-1]):
        assert last.outputs[0].finish_reason == "stop"
        assert (last.usage.completion_tokens, last.usage.cached_tokens) == (3, 3)
        assert last.usage.prompt_tokens == len(llm.tokenizer.encode("Hi there"))
    assert not pieces[0].HasField("usage")
    assert not pieces[0].outputs[0].HasField("finish_reason")
    entries = whole.outputs[0].logprobs[0].entries
    assert [(entry.token_id, entry.logprob, entry.rank) for entry in entries] == [
        (7, -0.5, 1),
        (8, float("-inf"), 2),
    ]
    assert [len(one.entries) for one in whole.prompt_logprobs][:2] == [0, 1]
    assert [len(piece.prompt_logprobs) > 0 for piece in pieces] == [True, False, False]
    kinds = [call.params.output_kind for call in llm.calls]
    assert kinds == [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA]
    names = llm.calls[0].options.names
    assert [name.split("-")[0] for name in names] == ["grpc"]
    assert llm.calls[0].options == RequestOptions(-2, "s", "/local", names=names)
    assert llm.calls[0].prompt == "Hi there"


async def test_fields_mean_what_they_mean_in_sampling_params(llm: FakeLLM, stub: Any) -> None:
    fields = {
        "n": 2,
        "max_tokens": 9,
        "temperature": 0.7,
        "seed": -5,
        "stop": ["a", "b"],
        "stop_token_ids": [5, 6],
        "ignore_eos": False,
        "skip_special_tokens": False,
        "logit_bias": {3: -1.5},
        "allowed_token_ids": [1, 2, 3],
        "bad_words": ["no"],
    }
    llm.defaults.temperature = 0.3
    tokens = pb.TokenizedInput(input_ids=[1, 2, 3])
    llm.facts = msgspec.structs.replace(llm.facts, logits_processors=("some:Class",))
    sampling = pb.SamplingParams(**fields)
    request = pb.GenerateRequest(tokenized=tokens, sampling_params=sampling, vllm_xargs='{"ban": [1]}')
    await stub.Generate(request)
    (call,) = llm.calls
    assert call.params.extra_args == {"ban": [1]}
    assert {name: getattr(call.params, name) for name in fields} == fields
    assert call.prompt == [1, 2, 3]


INVALID = grpc.StatusCode.INVALID_ARGUMENT
DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
# Fields of the request, those of its SamplingParams, and what they are answered with.
BAD_FIELDS: list[tuple[dict[str, Any], dict[str, Any], grpc.StatusCode, str, str | None]] = [
    ({}, {"temperature": 5.0}, INVALID, "temperature=5.0: ", "temperature"),
    ({}, {"temperature": float("nan")}, INVALID, "temperature=nan: ", "temperature"),
    ({}, {"max_tokens": 0}, INVALID, "max_tokens=0: expected an integer from 1", "max_tokens"),
    ({}, {"n": 2**40}, INVALID, "n=1099511627776: ", "n"),
    ({}, {"stop": ["a"] * 100_000}, INVALID, "stop=", "stop"),
    ({}, {"allowed_token_ids": [1] * 600_000}, INVALID, "allowed_token_ids=", "allowed_token_ids"),
    ({}, {"logit_bias": {2**32 - 1: 1.0}}, INVALID, "logit_bias=", "logit_bias"),
    ({}, {"n": 4}, EXHAUSTED, "3 sequences are under way", None),
    ({"timeout_s": -1.0}, {}, INVALID, "timeout_s=-1.0: ", "timeout_s"),
    ({"request_id": "x" * 201}, {}, INVALID, "request_id=", "request_id"),
    ({"vllm_xargs": "[1]"}, {}, INVALID, "vllm_xargs='[1]': expected a JSON object", "vllm_xargs"),
    ({"vllm_xargs": '{"a":' * 1500}, {}, INVALID, "vllm_xargs=", "vllm_xargs"),
    ({"vllm_xargs": " " * 9000 + "{}"}, {}, INVALID, "of at most 8192 bytes", "vllm_xargs"),
    ({"vllm_xargs": '{"a": 1}'}, {}, INVALID, "has no logits processors", "vllm_xargs"),
    ({"text": None}, {}, INVALID, "prompt: required, text or tokenized", "prompt"),
    ({"tokenized": pb.TokenizedInput()}, {}, INVALID, "prompt=[]: expected at least one token id", "prompt"),
    ({"tokenized": pb.TokenizedInput(input_ids=[1] * 500)}, {}, INVALID, "prompt='500 tokens': ", "prompt"),
    ({"model": "x"}, {}, grpc.StatusCode.NOT_FOUND, "model='x': ", "model"),
    ({"text": "a" * 5_000_000}, {}, EXHAUSTED, "larger than max", None),
]


@pytest.mark.server(max_waiting=0)
async def test_a_bad_field_is_refused_by_name_before_anything_runs(llm: FakeLLM, stub: Any) -> None:
    llm.gate.clear()
    three = stub.GenerateStream(pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(n=3)))
    await three.read()
    for fields, sampling, status, text, field in BAD_FIELDS:
        prompt = {} if "tokenized" in fields else {"text": "a"}
        request = pb.GenerateRequest(**prompt | fields, sampling_params=pb.SamplingParams(**sampling))
        seen, details, metadata = await find_error(stub.Generate(request))
        assert (seen, metadata.get("error-field")) == (status, field), details
        assert text in details
    assert len(llm.calls) == 1
    llm.gate.set()
    await read_rest(three)


async def test_bytes_that_are_no_message_and_a_call_without_one_are_refused(server: Server) -> None:
    async with connect(server) as channel:
        method = "/quire.grpc.engine.QuireEngine/Generate"
        status, text, metadata = await find_error(channel.unary_unary(method)(b"\xff\xff\xff"))
        assert (status, metadata["error-code"]) == (INVALID, "invalid_message")
        assert "quire.grpc.engine.GenerateRequest" in text
        nothing = channel.stream_unary(method)
        status, text, metadata = await find_error(nothing(iter(())))
        assert (status, text) == (INVALID, "message: required")
        unknown = channel.unary_unary("/quire.grpc.engine.QuireEngine/Nonsense")
        assert (await find_error(unknown(b"")))[0] == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (RequestFailedError("no", "queue_timeout"), grpc.StatusCode.UNAVAILABLE, None),
        (RequestFailedError("no", "overloaded"), grpc.StatusCode.RESOURCE_EXHAUSTED, None),
        (RequestFailedError("\u2026" * 5000, "poison_request"), grpc.StatusCode.INTERNAL, "-1"),
    ],
)
async def test_what_fails_in_the_engine_has_its_status_also_in_the_middle_of_a_stream(
    llm: FakeLLM, stub: Any, error: Exception, status: grpc.StatusCode, retry: str | None
) -> None:
    llm.error, llm.error_after = error, 1
    call = stub.GenerateStream(pb.GenerateRequest(text="a"))
    assert (await call.read()).outputs[0].text == "word "
    seen, _, metadata = await find_error(call.read())
    assert (seen, metadata.get("grpc-retry-pushback-ms")) == (status, retry)


@pytest.mark.server(api_keys=("one", "two"))
async def test_a_key_is_wanted_by_everything_but_the_health_check(
    llm: FakeLLM, stub: Any, server: Server
) -> None:
    request = pb.GenerateRequest(text="a")
    for metadata in ((), with_key("wrong"), (("x-api-key", "wrong"),), (("authorization", "one"),)):
        status, text, trailing = await find_error(stub.Generate(request, metadata=metadata))
        assert (status, trailing["error-code"]) == (grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key")
        assert "authorization: expected an API key of this server" in text
        status, _, _ = await find_error(stub.ListModels(pb.ListModelsRequest(), metadata=metadata))
        assert status == grpc.StatusCode.UNAUTHENTICATED
    async with connect(server) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(HEALTH)).status == health_pb2.HealthCheckResponse.SERVING
        status, _, _ = await find_error(health.Watch(HEALTH).read())
        assert status == grpc.StatusCode.UNAUTHENTICATED
    assert not llm.calls
    for metadata in (with_key("one"), (("x-api-key", "one"),), (("authorization", "bearer one"),)):
        await stub.Generate(request, metadata=metadata)
    options = Caller(hash_key("one")).make_options(None)
    assert {call.options.cache_salt for call in llm.calls} == {options.cache_salt}
    assert {call.options.tenant for call in llm.calls} == {hash_key("one")[:16]}


class KeylessContext:
    """A call without metadata, whose message nobody may ask for. Its caller does not read the answer."""

    def __init__(self, address: str = "10.0.0.1") -> None:
        self.statuses: list[grpc.StatusCode] = []
        self.has_answer = asyncio.Event()
        self._peer = f"ipv4:{address}:56"

    def invocation_metadata(self) -> None:
        return None

    def peer(self) -> str:
        return self._peer

    async def write(self, _message: bytes) -> None:
        self.has_answer.set()
        await asyncio.Event().wait()

    async def abort(self, status: grpc.StatusCode, *_: Any) -> None:
        self.statuses.append(status)


def make_handlers() -> tuple[Any, Any]:
    """What gRPC calls for Generate and for the health check, on a server with keys."""
    options = ServerOptions(api_key_hashes=(hash_key("one"),))
    models = ServedModels.of_one(FakeLLM(), options)  # type: ignore[arg-type]
    calls = CallHandler(options, set(), None)
    generate = calls.wrap(
        EngineService(models).methods["Generate"], "/quire.grpc.engine.QuireEngine/Generate"
    )
    return generate.stream_stream, calls.wrap(
        HealthService(models).methods["Check"], "/grpc.health.v1.Health/Check"
    ).stream_stream


async def test_a_message_is_not_asked_for_before_the_key_is_checked() -> None:
    context = KeylessContext()
    await make_handlers()[0](None, context)
    assert context.statuses == [grpc.StatusCode.UNAUTHENTICATED]


async def test_who_has_no_key_and_reads_no_answer_keeps_nobody_elses_health_check_out() -> None:
    _, check = make_handlers()
    contexts = [KeylessContext() for _ in range(64)]
    tasks = [asyncio.ensure_future(check(None, context)) for context in contexts]
    for context in contexts:
        await context.has_answer.wait()
    one_more, other = KeylessContext(), KeylessContext("10.0.0.2")
    await check(None, one_more)
    assert one_more.statuses == [grpc.StatusCode.RESOURCE_EXHAUSTED]
    tasks.append(asyncio.ensure_future(check(None, other)))
    await other.has_answer.wait()
    await cancel_and_wait(*tasks)


@pytest.mark.server(
    api_keys=("one",), options=GRPC | {"has_access_log": True, "log_format": "json", "log_level": "INFO"}
)
async def test_each_call_has_a_line_in_the_access_log(
    running: RunningServer, capfd: pytest.CaptureFixture[str]
) -> None:
    async with connect(running.server) as channel:
        stub, key = stubs.QuireEngineStub(channel), with_key("one")
        await stub.Generate(pb.GenerateRequest(text="a text", request_id="mine"), metadata=key)
        await find_error(stub.Generate(pb.GenerateRequest(text="a text")))
        bad = pb.GenerateRequest(text="a text", sampling_params=pb.SamplingParams(temperature=9))
        await find_error(stub.Generate(bad, metadata=key))
    await running.stop()
    text = capfd.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["status"] for line in lines] == [200, 401, 400]
    whole, _, refused = lines
    assert (whole["path"], whole["id"]) == ("/quire.grpc.engine.QuireEngine/Generate", "mine")
    assert (whole["client"], len(whole["key"]), whole["completion_tokens"]) == ("127.0.0.1", 8, 3)
    assert refused["cause"].startswith("temperature")
    assert "a text" not in text


@pytest.mark.server(max_body_s=0.2)
async def test_a_message_that_does_not_come_ends_the_call(server: Server) -> None:
    async with connect(server) as channel:
        call = channel.stream_unary("/quire.grpc.engine.QuireEngine/Generate")()
        status, text, _ = await find_error(call)
        assert (status, text) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "message: expected within 0.2 s (max_body_s)",
        )


async def test_hundreds_of_cancelled_calls_end_what_they_asked_for(
    llm: FakeLLM, stub: Any, server: Server
) -> None:
    llm.gate.clear()
    request = pb.GenerateRequest(text="a")
    calls = [stub.GenerateStream(request) if i % 2 else stub.Generate(request) for i in range(300)]
    await llm.wait_for_calls(300)
    for call in calls:
        call.cancel()
    await llm.wait_for_calls(300, 300)
    llm.gate.set()
    assert (await stub.Generate(request)).finished
    assert server._models.only.capacity.num_sequences == 0


async def test_a_deadline_ends_what_was_asked_for(llm: FakeLLM, stub: Any) -> None:
    llm.gate.clear()
    status, _, _ = await find_error(stub.Generate(pb.GenerateRequest(text="a"), timeout=0.2))
    assert status == grpc.StatusCode.DEADLINE_EXCEEDED
    await llm.wait_for_calls(1, 1)


@pytest.mark.server(api_keys=("one", "two"))
async def test_abort_ends_ones_own_requests_and_nobody_elses(llm: FakeLLM, stub: Any) -> None:
    llm.gate.clear()
    mine, other = with_key("one"), with_key("two")
    request = pb.GenerateRequest(text="a", request_id="mine")
    call = stub.GenerateStream(request, metadata=mine)
    assert (await call.read()).request_id == "mine"
    status, _, metadata = await find_error(stub.Generate(request, metadata=mine))
    assert (status, metadata["error-field"]) == (INVALID, "request_id")
    both = pb.AbortRequest(request_ids=["mine", "nobody's"])
    assert (await stub.Abort(both, metadata=other)).request_ids == []
    assert not llm.aborted
    assert (await stub.Abort(both, metadata=mine)).request_ids == ["mine"]
    last = (await read_rest(call))[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    await stub.Generate(request, metadata=mine)  # the id is free again


@pytest.mark.server(write_timeout_s=0.3)
async def test_a_stream_that_is_not_read_is_given_up_and_holds_little(llm: FakeLLM, server: Server) -> None:
    llm.pieces = ("x" * 2**16,) * 2000
    async with connect(server, **{"http2.bdp_probe": 0}) as channel:
        call = stubs.QuireEngineStub(channel).GenerateStream(pb.GenerateRequest(text="a"))
        await call.read()
        await llm.wait_for_calls(1, 1)
        pieces: list[Any] = []
        status, text, _ = await find_error(read_rest(call, pieces))
        assert (status, "answer: expected to be read within 0.3 s" in text) == (DEADLINE, True)
        assert len(pieces) < 100


async def test_models_and_health_say_what_is_served(stub: Any, server: Server) -> None:
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.max_model_len) == (server._models.only.model_id, 128)
    async with connect(server) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        status, text, _ = await find_error(health.Check(health_pb2.HealthCheckRequest(service="x")))
        assert (status, "service='x'" in text) == (grpc.StatusCode.NOT_FOUND, True)
        name = "quire.grpc.engine.QuireEngine"
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_sigterm_lets_calls_end_tells_watchers_and_takes_no_others(
    llm: FakeLLM, stub: Any, server: Server
) -> None:
    llm.gate.clear()
    draining = watch_drain(server)
    async with connect(server) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(HEALTH)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        call = stub.GenerateStream(pb.GenerateRequest(text="a"))
        await call.read()
        os.kill(os.getpid(), signal.SIGTERM)
        await draining.wait()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await watch.read() == grpc.aio.EOF
        status, _, _ = await find_error(stub.Generate(pb.GenerateRequest(text="a")))
        assert status == grpc.StatusCode.UNAVAILABLE
        llm.gate.set()
        assert (await read_rest(call))[-1].finished


@pytest.mark.server(drain_timeout_s=0.2)
async def test_what_outlasts_the_drain_time_is_aborted(llm: FakeLLM, stub: Any) -> None:
    llm.gate.clear()
    call = stub.GenerateStream(pb.GenerateRequest(text="a"))
    await call.read()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await read_rest(call))[-1].outputs[0].finish_reason == "abort"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:56", "10.0.0.1"),
        ("ipv6:[::1]:56", "0000:0000:0000:0000"),
        ("ipv6:%5B2001:db8::7%5D:56", "2001:0db8:0000:0000"),
        ("unix:", ""),
    ],
)
def test_a_caller_without_a_key_is_named_by_its_address(peer: str, address: str) -> None:
    assert find_address(peer) == address
