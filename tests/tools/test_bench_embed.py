"""The encoders of the bench are read by transformers; texts have the lengths they say; answers are read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from quire.ipc.errors import InputError
from quire.tools.bench import embed_http
from quire.tools.bench.cli import run as run_bench
from quire.tools.bench.contest import ContestError
from quire.tools.bench.embed import EmbedOptions
from quire.tools.bench.encoder_models import (
    ENCODERS,
    count_tokens,
    list_encoder_shapes,
    make_encoder_size,
    make_texts,
    write_encoder,
)
from quire.tools.bench.http_stream import AnswerError
from quire.tools.bench.load import RequestRecord, VectorReader
from quire.tools.bench.peers import Launch


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_transformers_finds_every_tensor_and_as_many_tokens_as_a_text_is_said_to_have(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = tmp_path / "encoder"
    write_encoder(ENCODERS["tiny-encoder"], folder)
    model, told = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == list_encoder_shapes(
        ENCODERS["tiny-encoder"]
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in make_texts("tiny-encoder", 4, 3, 20, "words"):
        token_ids = tokenizer(text)["input_ids"]
        assert len(token_ids) == count_tokens(text)
        assert tokenizer.unk_token_id not in token_ids


def test_texts_of_other_contents_have_the_same_lengths() -> None:
    first, second = (make_texts("minilm", 8, 16, 256, contents) for contents in ("a", "b"))
    assert first != second
    assert list(map(count_tokens, first)) == list(map(count_tokens, second))
    assert all(16 <= count_tokens(text) <= 256 for text in first)


def test_bge_small_has_the_size_of_its_shape() -> None:
    assert make_encoder_size("bge-small", "bfloat16").num_layer_params == 12 * 12 * 384 * 384


def test_an_answer_counts_when_it_has_a_vector() -> None:
    record = RequestRecord(0.0)
    reader = VectorReader(record)
    reader.take_body(200, b'{"data": [{"embedding": "AAAA"}], "usage"', 0.0)
    reader.take_body(200, b': {"prompt_tokens": 7}}', 0.0)
    reader.finish(200)
    assert (record.num_prompt_tokens, record.has_usage) == (7, True)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, b'{"error": {"message": "input: empty"}}', "HTTP 400: input: empty"),
        (200, b'{"data": [], "usage": {}}', "without vectors"),
        (200, b"<html>", "without vectors"),
    ],
)
def test_an_answer_without_a_vector_is_a_failure(status: int, body: bytes, error: str) -> None:
    reader = VectorReader(RequestRecord(0.0))
    reader.take_body(status, body, 0.0)
    with pytest.raises(AnswerError, match=error):
        reader.finish(status)


@pytest.mark.slow
def test_a_server_is_asked_a_text_a_request_and_its_processor_time_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embed_http, "_NUM_REQUESTS", {"tiny-encoder": 16})
    monkeypatch.setattr(embed_http, "compute_floor_s", lambda *_: 0.001)  # 16,000 texts/s
    options = EmbedOptions(("tiny-encoder",), ("float32",), (), {}, 1)
    assert embed_http.run_embed_http(options) == 0
    row = capsys.readouterr().out.splitlines()[-2].split()
    assert row[:2] == ["tiny-encoder,", "float32"]
    rate, floor, cpu_us, of_http_us = (float(row[i].replace(",", "")) for i in (2, 3, 5, 6))
    assert floor == pytest.approx(16_000)
    assert 0 < rate < floor
    assert 0 <= of_http_us <= cpu_us


def test_a_server_that_ends_at_once_is_said_to_have_ended(tmp_path: Path) -> None:
    launch = Launch([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"])
    server = embed_http.EmbedServer("peer", launch, 1, str(tmp_path / "log"))
    with pytest.raises(ContestError, match="peer: ended with code 3: no such model"):
        server.wait_until_ready()
    server.close()


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [(["--http", "--peer", "sentence-transformers"], "infinity with"), (["--peer", "infinity"], "without")],
)
def test_a_peer_without_this_way_is_refused(arguments: list[str], allowed: str) -> None:
    with pytest.raises(InputError, match=allowed):
        run_bench(["embed", *arguments])
