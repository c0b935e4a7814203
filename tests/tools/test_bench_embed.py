"""The encoders of the bench are read by transformers; texts have the lengths they say; answers are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.tools.bench.cli import run as run_bench
from quire.tools.bench.encoder_models import (
    count_tokens,
    list_encoder_shapes,
    make_texts,
    write_encoder,
)
from quire.tools.bench.http_stream import AnswerError
from quire.tools.bench.load import RequestRecord, VectorReader
from quire.tools.bench.model_configs import ENCODERS

pytestmark = pytest.mark.slow


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
def test_the_command_shows_a_row_a_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_bench(["embed", "--model", "tiny-encoder", "--dtype", "float32", "--rounds", "1"]) == 0
    row = capfd.readouterr().out.splitlines()[-1].split()
    assert row[:2] == ["tiny-encoder,", "float32"]
    assert float(row[2].replace(",", "")) > 0
    assert int(row[3].removesuffix("%")) > 0
