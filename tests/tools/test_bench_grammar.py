"""`quire bench grammar`: its tokenizer has texts, and its schemas compile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quire.frontend.text.tokenizer import load_tokenizer
from quire.tools.bench import grammar
from quire.tools.bench.byte_tokenizer import EOS_TOKEN_ID, write_tokenizer
from quire.tools.bench.model_configs import BENCH_MODELS


def test_the_schemas_of_the_bench_compile_for_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BENCH_MODELS["tiny"]
    write_tokenizer(tmp_path, config["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (config["vocab_size"], EOS_TOKEN_ID)
    assert tokenizer.decode(tokenizer.encode('{"a": 1}')) == '{"a": 1}'
    monkeypatch.setattr(grammar, "NUM_COMPILED", 12)
    assert len(grammar._measure_compiles(tmp_path, "tiny")) == 12
