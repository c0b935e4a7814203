"""`quire serve` as a process: what it prints, refuses and leaves behind; gRPC. Its HTTP API: `clients/`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest
from grpc_client import make_client, with_key
from quire.frontend.cli.entry import run_command
from served import FAKE_COMMAND, FAKE_ENV, TIMEOUT_S, Served

KEY_IN_ENV = {"QUIRE_API_KEY": "from-env"}
ENDLESS: dict[str, Any] = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with keys from a file and from the environment, for as long as no test has ended it."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# mine\nfrom-file\n")
    keys.chmod(0o600)
    options = ("--api-key-file", str(keys), "--grpc-port", "0")
    server = Served(*options, env=KEY_IN_ENV | FAKE_ENV, api_key="from-env", command=FAKE_COMMAND)
    yield server
    if server.process.returncode is None:
        assert server.stop() == 0


def test_a_whole_answer_whose_client_leaves_frees_its_blocks(served: Served) -> None:
    served.wait_until_idle()
    body = json.dumps({"prompt": "Once", "max_tokens": 1900, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer from-env\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        deadline = time.monotonic() + 5
        while served.get("/stats")["stats"]["num_running"] == 0:
            assert time.monotonic() < deadline
    served.wait_until_idle()


def test_an_answer_is_aborted_by_its_id_through_another_server_of_the_engine_with_its_key(
    served: Served,
) -> None:
    other = Served("--attach", f"serve-{served.port}", "--api-key", "from-file", env=KEY_IN_ENV)
    try:
        with served.client("from-env") as client:
            asked = {"x-request-id": "mine"}
            stream = client.completions.create(
                model="pocket", prompt="Once", stream=True, extra_headers=asked, **ENDLESS
            )
            chunks = iter(stream)
            answer_id = next(chunks).id
            for key in ("from-file", "from-env"):  # the first is another caller's, and ends nothing
                with other.client(key) as aborting:
                    body = {"request_ids": ["unknown", answer_id if key == "from-file" else "mine"]}
                    told = aborting.with_options(base_url=other.url).post(
                        "/abort_requests", body=body, cast_to=dict[str, str]
                    )
                    assert told == {"status": "ok"}
                    assert next(chunks).choices[0].finish_reason is None
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "abort"
    finally:
        assert other.stop() == 0
    served.wait_until_idle()


def test_the_printed_curl_line_works_as_printed(served: Served) -> None:
    line = next(line for line in served.box.splitlines() if line.strip().startswith("curl "))
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | KEY_IN_ENV
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_document_the_docs_the_page_and_metrics_are_there(served: Served) -> None:
    assert served.get("/openapi.json")["openapi"].startswith("3.")
    for path in ("/metrics", "/"):
        request = urllib.request.Request(served.url + path, headers={"authorization": "Bearer from-env"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            assert answer.status == 200


def test_grpc_answers_as_http_does_token_for_token(served: Served) -> None:
    pb, stubs = make_client()
    sampling = {"max_tokens": 24, "seed": 5, "logprobs": 1, "n": 2}
    with served.client() as client:
        told = client.completions.create(model="pocket", prompt="Once upon", **sampling)
    request = pb.GenerateRequest(text="Once upon", sampling_params=pb.SamplingParams(**sampling))
    with grpc.insecure_channel(served.grpc_address) as channel:
        stub, metadata = stubs.QuireEngineStub(channel), with_key("from-file")
        whole = stub.Generate(request, metadata=metadata, timeout=TIMEOUT_S)
        pieces = list(stub.GenerateStream(request, metadata=metadata, timeout=TIMEOUT_S))
    assert whole.usage.completion_tokens == pieces[-1].usage.completion_tokens == told.usage.completion_tokens
    for index, choice in enumerate(told.choices):
        parts = [part for piece in pieces for part in piece.outputs if part.index == index]
        assert whole.outputs[index].text == "".join(part.text for part in parts) == choice.text
        token_ids = [token_id for part in parts for token_id in part.token_ids]
        assert whole.outputs[index].token_ids == token_ids
        logprobs = [position.entries[0].logprob for position in whole.outputs[index].logprobs]
        assert logprobs == pytest.approx(choice.logprobs.token_logprobs)


def test_a_grpc_call_that_is_refused_or_cancelled_leaves_nothing(served: Served) -> None:
    pb, stubs = make_client()
    with grpc.insecure_channel(served.grpc_address) as channel:
        stub, metadata = stubs.QuireEngineStub(channel), with_key("from-env")
        bad_id = pb.TokenizedInput(input_ids=[4_000_000_000])
        for request in (pb.GenerateRequest(text=""), pb.GenerateRequest(tokenized=bad_id)):
            with pytest.raises(grpc.RpcError, match="prompt") as caught:
                stub.Generate(request, metadata=metadata, timeout=TIMEOUT_S)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        endless = pb.SamplingParams(max_tokens=1900, ignore_eos=True)
        request = pb.GenerateRequest(text="Once", sampling_params=endless)
        stream = stub.GenerateStream(request, metadata=metadata, timeout=TIMEOUT_S)
        assert next(stream).outputs
        stream.cancel()
        served.wait_until_idle()


def test_a_port_in_use_is_refused_before_the_model_loads_and_names_its_owner(served: Served) -> None:
    arguments = ["-m", "quire", "serve", "--port", str(served.port)]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert f"pid {served.process.pid} " in done.stderr
    assert "quire serve" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "no.such.host.invalid", "--insecure-no-key"], "host="),
        (["--port", "70000"], "port=70000"),
        (["--limit", "max_bdy_bytes=1"], "did you mean 'max_body_bytes'"),
        (["--limit", "max_body_bytes=0"], "max_body_bytes='0'"),
        (["--api-key-file", "/no/such/file"], "api_key_file"),
        (["--api-key", "a b"], "api_key"),
        (["--max-model-len", "0"], "max_model_len"),
        (["--grpc-port", "70000"], "grpc_port=70000"),
    ],
)
def test_options_that_cannot_be_used_are_refused_with_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["serve", "--port", "0", *arguments]) == 2
    errors = capsys.readouterr().err
    assert text in errors
    assert len(errors.splitlines()) == 1


def test_a_grpc_port_is_refused_where_it_cannot_be_had(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = served.grpc_address.rpartition(":")[2]
    assert run_command(["serve", "--port", "0", "--grpc-port", port]) == 2
    assert f"grpc_port={port}: expected a free port; this one is in use by pid" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "quire.frontend.grpc.server", None)
    assert run_command(["serve", "--port", "0", "--grpc-port", "0"]) == 2
    assert f"grpc_port=0: only with: {sys.executable} -m pip install 'quire[grpc]'" in capsys.readouterr().err


def test_help_limits_shows_the_table_with_what_was_set() -> None:
    command = [sys.executable, "-m", "quire", "serve", "--help-limits", "--limit", "max_prompts=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert rows["max_prompts"].split()[1] == "3"
    assert rows["max_body_bytes"].split()[1] == "8388608"  # as --limit takes it
    assert {"max_header_bytes", "max_body_bytes", "write_timeout_s", "logit_bias"} <= set(rows)


def test_keys_are_wanted_and_a_running_stream_finishes_after_sigterm(served: Served) -> None:
    with served.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with served.client("from-env") as client:
        client.models.list()
    with served.client("from-file") as client:
        stream = client.completions.create(
            model="pocket", prompt="Once", stream=True, **(ENDLESS | {"max_tokens": 400})
        )
        chunks = iter(stream)
        next(chunks)
        served.process.send_signal(signal.SIGTERM)
        last = [chunk.choices[0].finish_reason for chunk in chunks][-1]
        assert last == "length"
    assert served.process.wait(10) == 0
    assert served.process.stdout is not None
    served.process.stdout.close()
