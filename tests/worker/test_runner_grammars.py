"""The runner on a toy model: rows with a grammar in chunks, resumed, launched ahead, and one that fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from msgspec import structs
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.spec.config import EngineConfig
from quire.worker.sampling import grammars
from quire.worker.steps.side_thread import SideJob, SideThread
from row_driver import Driver, make_prompt, toy_config

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ12345678"
EOS = 0  # then the letters
GRAMMAR = LLMatcher.grammar_from_regex("([a-e]{3}[0-9]){40}")
NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=40)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """With a tokenizer of one letter a token."""
    folder: Path = tmp_path_factory.mktemp("letters")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {"<end>": EOS} | {letter: 1 + place for place, letter in enumerate(LETTERS)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    text = {"version": "1.0", "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    config = toy_config()
    return structs.replace(
        config, model=structs.replace(config.model, tokenizer=str(folder), eos_token_ids=(EOS,))
    )


def _run(config: EngineConfig, is_async: bool = False, chunk: int = 1000) -> Driver:
    """A row with a grammar beside one without."""
    driver = Driver(config, is_async)
    driver.enter("constrained", 3, make_prompt(9), PARAMS, eos=[EOS], grammar=GRAMMAR)
    driver.enter("free", 1, make_prompt(5), SamplingParams(temperature=1.0, seed=4))
    driver.run(NUM_TOKENS, chunk)
    return driver


@pytest.fixture(scope="module")
def tokens(config: EngineConfig) -> list[int]:
    return _run(config).requests["constrained"].tokens[:NUM_TOKENS]


def test_a_row_follows_its_grammar_and_its_neighbour_goes_its_way(
    config: EngineConfig, tokens: list[int]
) -> None:
    text = "".join(LETTERS[token - 1] for token in tokens)
    assert all(letter in ("12345678" if place % 4 == 3 else "abcde") for place, letter in enumerate(text))
    alone = Driver(config)
    alone.enter("free", 1, make_prompt(5), SamplingParams(temperature=1.0, seed=4))
    assert alone.run(NUM_TOKENS)["free"] == _run(config).requests["free"].tokens[:NUM_TOKENS]


@pytest.mark.parametrize("has_others", [False, True])
def test_other_edits_count_among_what_the_grammar_allows(config: EngineConfig, has_others: bool) -> None:
    driver, b = Driver(config), 1 + LETTERS.index("b")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, logit_bias={b: 100.0})
    driver.enter("biased", 3, make_prompt(9), params, eos=[EOS], grammar=GRAMMAR)
    if has_others:
        driver.enter("constrained", 1, make_prompt(9), PARAMS, eos=[EOS], grammar=GRAMMAR)
    driver.run(NUM_TOKENS)
    written = [token == b for token in driver.requests["biased"].tokens[:NUM_TOKENS]]
    assert written == [True, True, True, False] * (NUM_TOKENS // 4)


@pytest.mark.parametrize("chunk", [1, 4])
def test_chunks_change_no_token(config: EngineConfig, tokens: list[int], chunk: int) -> None:
    assert _run(config, chunk=chunk).requests["constrained"].tokens[:NUM_TOKENS] == tokens


@pytest.mark.parametrize("is_late", [False, True])
def test_masks_that_are_computed_beside_the_model_change_no_token(
    config: EngineConfig, tokens: list[int], monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    started: list[SideJob[Any]] = []

    def start(_: SideThread, work: Callable[[], Any]) -> SideJob[Any]:
        started.append(SideJob(work))
        if not is_late:
            started[-1].run()
        return started[-1]

    monkeypatch.setattr(SideThread, "start", start)
    monkeypatch.setattr(grammars, "_MIN_SLOW_S", 0.0)
    driver = _run(config)
    assert driver.requests["constrained"].tokens[:NUM_TOKENS] == tokens
    assert len(started) == NUM_TOKENS
    driver.enter("free alone", 2, make_prompt(3), SamplingParams(temperature=1.0, seed=5))
    driver.launch({"free alone": 3})
    assert len(started) == NUM_TOKENS, "only where there is a grammar"


def test_a_step_that_fails_leaves_nothing_of_its_masks(
    config: EngineConfig, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MIN_SLOW_S", 0.0)
    driver = Driver(config)
    driver.enter("constrained", 3, make_prompt(9), PARAMS, eos=[EOS], grammar=GRAMMAR)
    driver.run(2)
    with monkeypatch.context() as broken:
        broken.setattr(driver.model, "compute_logits", None)
        with pytest.raises(TypeError):
            driver.launch({"constrained": 1})
    driver.runner.reset_rows()
    again = driver.requests["constrained"].tokens[:2]
    driver.free("constrained")
    driver.enter("again", 5, make_prompt(9), PARAMS, output=again, eos=[EOS], grammar=GRAMMAR)
    assert driver.run(NUM_TOKENS - 2)["again"] == tokens[2:]


def test_a_step_that_is_launched_before_the_last_token_is_known_changes_no_token(
    config: EngineConfig, tokens: list[int]
) -> None:
    driver = Driver(config, is_async=True)
    driver.enter("constrained", 3, make_prompt(9), PARAMS, eos=[EOS], grammar=GRAMMAR)
    launched = driver.launch({"constrained": 9})
    for _ in range(NUM_TOKENS - 1):
        ahead = driver.launch({"constrained": 1})
        driver.collect(launched)
        launched = ahead
    driver.collect(launched)
    assert driver.requests["constrained"].tokens == tokens


@pytest.mark.parametrize("num_known", [1, 6])
def test_a_resumed_row_goes_on_where_it_was(config: EngineConfig, tokens: list[int], num_known: int) -> None:
    driver = Driver(config)
    output = tokens[:num_known]
    driver.enter("again", 5, make_prompt(9), PARAMS, output=output, eos=[EOS], grammar=GRAMMAR)
    assert driver.run(NUM_TOKENS - num_known)["again"] == tokens[num_known:]


def test_a_row_whose_grammar_fails_is_named_and_the_others_go_on(
    config: EngineConfig, tokens: list[int]
) -> None:
    driver = Driver(config)
    driver.enter("constrained", 3, make_prompt(9), PARAMS, eos=[EOS], grammar=GRAMMAR)
    driver.enter("stuck", 6, make_prompt(4), PARAMS, eos=[EOS], grammar="start: (")
    driver.run(NUM_TOKENS)
    assert set(driver.failed_rows) == {6}
    assert driver.bad_rows == []
    assert driver.requests["constrained"].tokens[:NUM_TOKENS] == tokens
