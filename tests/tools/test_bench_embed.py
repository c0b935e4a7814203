"""The encoders of the bench are read by transformers; texts have the lengths they say."""

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


@pytest.mark.slow
def test_the_command_shows_a_row_a_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_bench(["embed", "--model", "tiny-encoder", "--dtype", "float32", "--rounds", "1"]) == 0
    row = capfd.readouterr().out.splitlines()[-1].split()
    assert row[:2] == ["tiny-encoder,", "float32"]
    assert float(row[2].replace(",", "")) > 0
    assert int(row[3].removesuffix("%")) > 0
