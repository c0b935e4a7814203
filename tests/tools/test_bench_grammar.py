"""`quire bench grammar`: its tokenizer has texts, and its schemas compile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quire.frontend.formats.schemas.grammar_text import make_grammar_text
from quire.frontend.text.tokenizer import load_tokenizer
from quire.ipc.errors import InputError
from quire.ipc.params.structured_outputs import StructuredOutputsParams
from quire.tools.bench import grammar, grammar_contest
from quire.tools.bench.byte_tokenizer import EOS_TOKEN_ID, write_tokenizer
from quire.tools.bench.cli import run as run_bench
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


def test_the_schemas_of_the_bench_are_different_grammars() -> None:
    texts = {
        make_grammar_text(StructuredOutputsParams(json=grammar.make_schema(title))).text for title in "ab"
    }
    assert len(texts) == 2


def test_the_same_beside_a_peer_is_one_table(tmp_path: Path) -> None:
    rates = {("quire", False): [90.0, 100.0, 110.0], ("quire", True): [50.0, 50.0, 50.0]}
    rates |= {("vllm", has_schemas): [25.0, 25.0, 25.0] for has_schemas in (False, True)}
    row = grammar_contest._format_row("rate", rates, is_time=False)
    assert row == ["rate", "100", "50.0", "25.0", "25.0", "4.00", "2.00"]
    assert grammar_contest._format_row("ms", rates, is_time=True)[1:5] == ["10.0", "20.0", "40.0", "40.0"]
    with pytest.raises(InputError, match="peer_python"):
        run_bench(["grammar", "--peer", "vllm", "--peer-python", str(tmp_path / "python")])
