"""Grammars in the worker: what can be sampled, where an output ends, and that failures are one row's."""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from fakes import make_config
from llguidance import LLMatcher
from msgspec import structs
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.text.tokenizer import load_tokenizer
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.params.structured_outputs import MAX_MASK_S
from quire.ipc.protocol import kept_grammars
from quire.ipc.protocol.step import NewRequestData
from quire.ipc.protocol.token_ids import encode_token_ids
from quire.ipc.protocol.token_lists import pack_token_lists
from quire.ipc.spec.config import ModelConfig
from quire.worker.sampling import grammars as grammars_module
from quire.worker.sampling.grammars import Grammars
from quire.worker.sampling.logit_edit import EditedRow, LogitEdit, RowStart
from quire.worker.sampling.logit_edits import apply_logit_edits, make_logit_edits
from torch import Tensor

VOCAB_SIZE = 2100  # of a model whose vocabulary is padded: the pocket tokenizer has 2048
EOS = [0, 2]
TOKENIZER = load_tokenizer(pocket_folder())
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def make_model(**changes: Any) -> ModelConfig:
    model = make_config(vocab_size=VOCAB_SIZE, eos_token_ids=tuple(EOS)).model
    return structs.replace(model, **({"tokenizer": str(pocket_folder())} | changes))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(make_model())


class Row:
    """A row that samples alone, or beside others with `apply`."""

    def __init__(
        self, grammars: Grammars, grammar: str, output: list[int] | None = None, **params: Any
    ) -> None:
        self.output = list(output or [])
        self._num_before = len(self.output)
        sampling = SamplingParams(**params)
        lists = pack_token_lists(sampling, [], VOCAB_SIZE)
        packed = encode_token_ids(self.output)
        request = NewRequestData(0, "r", b"", packed, sampling, EOS, lists, [], 0, grammar)
        nothing, start = np.empty(0, dtype=np.int32), np.array(self.output, dtype=np.int32)
        self.edits: list[LogitEdit[Any]] = make_logit_edits(
            RowStart(request, nothing, start, VOCAB_SIZE, grammars)
        )

    def append(self, text_or_id: str | int) -> None:
        ids = [text_or_id] if isinstance(text_or_id, int) else TOKENIZER.encode(text_or_id)
        for token in ids:
            self.output.append(token)
            for edit in self.edits:
                edit.append(token)

    def allowed(self) -> list[int]:
        """The tokens that can be sampled next."""
        logits, (row,) = apply([self])
        assert row.failure == ""
        return torch.isfinite(logits[0]).nonzero()[:, 0].tolist()

    def failure(self) -> str:
        return apply([self])[1][0].failure

    def finish(self, seed: int) -> str:
        """The text of random tokens until the end of sequence."""
        rng = random.Random(seed)
        while True:
            token = rng.choice(self.allowed())
            if token in EOS:
                return TOKENIZER.decode(self.output)
            self.append(token)


def apply(rows: list[Row]) -> tuple[Tensor, list[EditedRow]]:
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    edited = [
        EditedRow(i, row.edits, np.array(row.output, dtype=np.int32), len(row.output), len(row.output))
        for i, row in enumerate(rows)
    ]
    apply_logit_edits(logits, edited)
    return logits, edited


def ids_of(*texts: str) -> list[int]:
    return sorted(TOKENIZER.encode(text)[0] for text in texts)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_sampled_follows_the_grammar(grammars: Grammars, seed: int) -> None:
    text = Row(grammars, regex("(yes|no)( [a-f]{2,4}[0-9]){1,3}"), temperature=1.0).finish(seed)
    assert re.fullmatch("(yes|no)( [a-f]{2,4}[0-9]){1,3}", text)
    fields = json.loads(Row(grammars, LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))).finish(seed))
    assert list(fields) == ["name", "age"]
    assert len(fields["name"]) <= 9
    assert fields["age"] <= 99


def test_the_output_ends_where_the_grammar_may_and_must(grammars: Grammars) -> None:
    row = Row(grammars, regex("ab?"))
    assert EOS[0] not in row.allowed()
    row.append("a")
    assert row.allowed() == sorted([*EOS, *ids_of("b")])
    row.append("b")
    assert row.allowed() == EOS[:1]
    row.append(EOS[0])
    assert row.allowed() == EOS[:1], "a step that was launched before the end was known"


@pytest.mark.parametrize("params", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_an_end_that_would_be_too_early_comes_only_where_nothing_else_can(
    grammars: Grammars, params: dict[str, Any]
) -> None:
    row = Row(grammars, regex("ab?"), max_tokens=9, **params)
    row.append("a")
    assert row.allowed() == ids_of("b")
    row.append("b")
    assert row.allowed() == EOS[:1]


def test_min_tokens_lets_the_output_end_from_there_on(grammars: Grammars) -> None:
    row = Row(grammars, regex("[ab]*"), max_tokens=9, min_tokens=2)
    ends: list[bool] = []
    for _ in range(3):
        ends.append(set(EOS) <= set(row.allowed()))
        row.append("a")
    assert ends == [False, False, True]


def test_no_other_edit_allows_what_the_grammar_refuses_or_forbids_its_end(grammars: Grammars) -> None:
    others = {
        "allowed_token_ids": ids_of("a", "x"),
        "logit_bias": {ids_of("x")[0]: 100.0, EOS[0]: -100.0, EOS[1]: -100.0},
        "repetition_penalty": 2.0,
    }
    row = Row(grammars, regex("a"), **others)
    assert row.allowed() == ids_of("a")
    row.append("a")
    assert row.allowed() == EOS[:1]


def test_a_row_that_is_resumed_goes_on_as_if_it_had_not_been_away(grammars: Grammars) -> None:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    row, rng = Row(grammars, grammar), random.Random(3)
    while (token := rng.choice(row.allowed())) not in EOS:
        row.append(token)
        assert Row(grammars, grammar, row.output).allowed() == row.allowed()


@pytest.mark.parametrize("min_shared_s", [-1.0, 10.0])
def test_rows_are_masked_each_by_its_own_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, min_shared_s: float
) -> None:
    monkeypatch.setattr(grammars_module, "_MIN_SHARED_S", min_shared_s)
    texts = [regex("a"), "start: (", regex("[bc]"), regex("d"), ""]
    logits, edited = apply([Row(grammars, text) for text in texts])
    allowed = [torch.isfinite(row).nonzero()[:, 0].tolist() for row in logits]
    assert allowed[0] == ids_of("a")
    assert set(ids_of("b", "c")) == set(allowed[2])
    assert allowed[3] == ids_of("d")
    assert len(allowed[4]) == VOCAB_SIZE
    assert [bool(row.failure) for row in edited] == [False, True, False, False, False]


def test_tokens_without_a_text_are_never_part_of_one(grammars: Grammars) -> None:
    allowed = Row(grammars, regex("(?s:.*)")).allowed()
    special = {1}  # <|im_start|>
    assert not special & set(allowed)
    assert max(allowed) < 2048, "what pads the vocabulary"
    assert set(EOS) <= set(allowed)


def test_an_end_of_sequence_with_a_text_does_not_end_an_output_early() -> None:
    [a] = ids_of("a")
    row = Row(Grammars(make_model(eos_token_ids=(a,))), regex("[ab]x"))
    assert a not in row.allowed()


# -- what can go wrong


def test_a_grammar_that_does_not_compile_fails_its_row_with_the_place(grammars: Grammars) -> None:
    assert re.match(r"its grammar does not compile: 1\(9\): Expected", Row(grammars, "start: (").failure())


def test_an_output_that_does_not_follow_the_grammar_fails_its_row(grammars: Grammars) -> None:
    assert "cannot be followed" in Row(grammars, regex("a"), output=ids_of("b")).failure()


def ambiguous(num_alternatives: int, start: str = "z+") -> str:
    """A grammar of which a mask takes as the third power of its alternatives: of 250 50 s."""
    names = [f"x{number}" for number in range(num_alternatives)]
    rules = [f"start: {start}", "z: " + "|".join(f"{name} z?" for name in names)]
    return LLMatcher.grammar_from_lark("\n".join([*rules, *(f"{name}: /[a-z ]/" for name in names)]))


def work_of(row: EditedRow) -> float:
    return row.work_us * 1e-6


@pytest.mark.parametrize("num_alternatives", [60, 250, 1_000])
def test_a_grammar_whose_mask_takes_too_long_fails_its_row_for_its_time(
    grammars: Grammars, num_alternatives: int
) -> None:
    rows = [Row(grammars, ambiguous(num_alternatives)), Row(grammars, regex("a"))]
    logits, edited = apply(rows)
    assert "took more than 30 ms of processor time" in edited[0].failure
    assert edited[1].failure == ""
    assert torch.isfinite(logits[1]).nonzero()[:, 0].tolist() == ids_of("a")
    assert MAX_MASK_S * 0.9 < work_of(edited[0]) < 10 * MAX_MASK_S, "the mask, and what compiles it"


def test_a_grammar_whose_mask_takes_too_long_later_fails_its_row_then(grammars: Grammars) -> None:
    row = Row(grammars, ambiguous(250, "/[0-9]{6}#/ z+"))
    for _ in range(5):
        assert row.allowed()
        row.append("7")
    row.append("7")
    row.append("#")
    assert "processor time" in row.failure()


def test_of_many_rows_with_a_grammar_that_takes_too_long_few_are_tried(grammars: Grammars) -> None:
    _, edited = apply([Row(grammars, ambiguous(250)) for _ in range(64)])
    assert all(row.failure for row in edited)
    assert sum(map(work_of, edited)) < 20 * MAX_MASK_S


@pytest.mark.parametrize("rule", ['s s | "a" | "b"', 's s s s | /[a-z ]/ | ""', "s s | s s s | /[a-z ]/"])
def test_an_ambiguous_grammar_ends_before_all_rows_wait_for_it(grammars: Grammars, rule: str) -> None:
    row = Row(grammars, LLMatcher.grammar_from_lark(f"start: s\ns: {rule}"))
    for _ in range(1_000):
        _, (edited,) = apply([row])
        assert work_of(edited) < 20 * MAX_MASK_S
        if edited.failure:
            assert re.search("max_items_in_row|processor time", edited.failure)
            return
        row.append("a")
    pytest.fail("it goes on")


def test_a_step_of_which_all_matchers_have_failed_goes_on(grammars: Grammars) -> None:
    rows = [Row(grammars, ambiguous(250)) for _ in range(2)]
    for _ in range(3):
        assert all(row.failure for row in apply(rows)[1])


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Grammars:
    """Grammars that follow all in processes of their own."""
    monkeypatch.setattr(grammars_module, "_SMALL", ())
    return Grammars(make_model())


def test_a_row_that_is_followed_in_a_process_of_its_own_goes_as_any_other(
    grammars: Grammars, apart: Grammars
) -> None:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    here, there, rng = Row(grammars, grammar), Row(apart, grammar), random.Random(3)
    while (token := rng.choice(here.allowed())) not in EOS:
        assert there.allowed() == here.allowed()
        assert Row(apart, grammar, here.output).allowed() == here.allowed(), "resumed"
        here.append(token)
        there.append(token)
    assert set(EOS) & set(there.allowed())
    assert "doesn't satisfy" in Row(apart, grammar, ids_of("b")).failure()
    assert "Expected" in Row(apart, "start: (").failure()


def test_a_row_goes_on_elsewhere_where_its_grammar_turns_out_not_to_be_small(grammars: Grammars) -> None:
    row = Row(grammars, LLMatcher.grammar_from_lark('start: s\ns: s s | "a" | "b"'))
    at_first = row.allowed()
    while row.edits[0]._matcher.child is None:
        row.append("a")
        assert row.allowed() == sorted({*at_first, *EOS})
        assert len(row.output) < 200


def test_a_process_of_a_row_that_dies_costs_that_row(apart: Grammars) -> None:
    rows = [Row(apart, regex("[ab]*")) for _ in range(3)]
    apply(rows)
    os.kill(rows[1].edits[0]._matcher.child._pid, signal.SIGSEGV)
    _, edited = apply(rows)
    assert [row.failure.split(" ended ")[-1] for row in edited] == ["", "by SIGSEGV", ""]
    os.kill(apart._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, apart._process.pid, os.WEXITED | os.WNOWAIT)
    assert Row(apart, regex("a")).allowed() == ids_of("a"), "there is another one"
    for row in (rows[0], rows[2]):
        row.append("a")
        assert row.allowed()


def test_a_text_is_compiled_once_for_all_its_rows_apart_and_again_when_it_was_given_up(
    apart: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "_MAX_TEMPLATES", 2)
    rows = [Row(apart, regex(letter)) for letter in "aabac"]
    assert not any(row.failure for row in apply(rows)[1])
    templates = dict(apart._templates)
    assert list(templates) == [regex("a"), regex("c")], "the one that was used longest ago goes first"
    for row, letter in zip(rows, "aabac", strict=True):
        row.append(letter)
        assert row.allowed() == EOS[:1], "it goes on"
    Row(apart, regex("a")).allowed()
    assert apart._templates[regex("a")] is templates[regex("a")]
    assert Row(apart, regex("b")).allowed() == ids_of("b")


def test_a_text_that_takes_too_long_to_compile_fails_its_rows_for_it(apart: Grammars) -> None:
    words = [f"{number:x}{number * 7919:x}" for number in range(40_000)]
    rows = [Row(apart, LLMatcher.grammar_from_lark("start: " + "|".join(f'"{one}"' for one in words)))]
    rows.append(Row(apart, regex("a")))
    _, edited = apply(rows)
    assert "0.2 s of processor time to compile" in edited[0].failure
    assert edited[1].failure == ""
    assert work_of(edited[0]) > 0.1


def test_a_row_that_leaves_leaves_no_process(apart: Grammars) -> None:
    row = Row(apart, regex("[ab]*"))
    row.allowed()
    fd = os.pidfd_open(row.edits[0]._matcher.child._pid)
    row.edits.clear()
    assert select.select([fd], [], [], 30.0)[0]
    os.close(fd)


class PanicException(BaseException):
    """As the library's own, which it does not export."""


def panic(*_: Any, **__: Any) -> Any:
    raise PanicException("index out of bounds")


class Fragile:
    """A matcher of the library, one method of which panics."""

    def __init__(self, inner: LLMatcher, method: str) -> None:
        self._inner, self._method = inner, method

    def __getattr__(self, name: str) -> Any:
        return panic if name == self._method else getattr(self._inner, name)


@pytest.mark.parametrize("method", ["unsafe_compute_mask_ptr", "consume_token"])
def test_a_panic_of_the_library_fails_its_row_alone(grammars: Grammars, method: str) -> None:
    rows = [Row(grammars, regex("[ab]*")) for _ in range(3)]
    apply(rows)
    matcher = rows[1].edits[0]._matcher
    matcher.inner = Fragile(matcher.inner, method)
    for row in rows:
        row.append("a")
    logits, edited = apply(rows)
    assert ["panicked: index out of bounds" in row.failure for row in edited] == [False, True, False]
    assert torch.isfinite(logits[0]).nonzero().tolist() == torch.isfinite(logits[2]).nonzero().tolist()


def test_whatever_a_matcher_raises_fails_its_row_alone_among_several_threads(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "_MIN_SHARED_S", -1.0)
    monkeypatch.setattr(grammars, "_num_threads", 2)
    rows = [Row(grammars, regex("[ab]*")) for _ in range(3)]
    apply(rows)
    matcher = rows[1].edits[0]._matcher
    matcher.inner = Fragile(matcher.inner, "no_such_method")
    matcher.inner.unsafe_compute_mask_ptr = None
    _, edited = apply(rows)
    assert ["TypeError" in row.failure for row in edited] == [False, True, False]


def test_a_panic_of_a_compile_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance, "LLMatcher", panic)
    assert "panicked" in Row(Grammars(make_model()), regex("a")).failure()


def _write_word_level(folder: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"t0": 0, "t1": 1}, "unk_token": "t0"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))


@pytest.mark.parametrize(
    ("write", "changes", "message"),
    [
        (lambda _: None, {}, "No such file"),
        (lambda folder: (folder / "tokenizer.json").write_text("gpt2"), {}, "not a JSON object"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), {}, "this model's tokenizer"),
        (_write_word_level, {}, "this model's tokenizer"),
        (_write_word_level, {"eos_token_ids": ()}, "eos_token_id"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_read_once_and_fails_who_needs_it(
    tmp_path: Path, write: Callable[[Path], None], changes: dict[str, Any], message: str
) -> None:
    write(tmp_path)
    grammars = Grammars(make_model(tokenizer=str(tmp_path), **changes))
    assert message in Row(grammars, regex("a")).failure()
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    assert message in Row(grammars, regex("a")).failure()
    assert len(Row(grammars, "").edits) == 0


def test_a_text_is_compiled_once_as_long_as_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def make(tokenizer: Any, grammar: str, **options: Any) -> LLMatcher:
        compiled.append(grammar)
        return LLMatcher(tokenizer, grammar, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", make)
    monkeypatch.setattr(kept_grammars, "MAX_KEPT_GRAMMARS", 2)
    grammars = Grammars(make_model())
    a, b, c = (regex(letter) for letter in "abc")
    for text in (a, a, b, a, c, a, b):
        assert len(Row(grammars, text).allowed()) >= 1
    assert compiled == [a, b, c, b], "the one that was used longest ago goes first"
    monkeypatch.setattr(kept_grammars, "MAX_KEPT_CHARACTERS", len(a))
    for text in (a, c, c):
        Row(grammars, text).allowed()
    assert compiled[4:] == [c]
    for _ in range(2):
        assert "does not compile" in Row(grammars, ")").failure()
    assert compiled[5:] == [")"], "a bad one takes its time once, too"


def test_a_chain_of_rules_that_takes_all_of_a_stack_to_compile_fails_its_row(grammars: Grammars) -> None:
    rules = [f'a{number}: a{number + 1} | "b"' for number in range(6_000)]
    text = LLMatcher.grammar_from_lark("\n".join(["start: a0", *rules, 'a6000: "a"']))
    (edited,) = apply([Row(grammars, text)])[1]
    assert re.search("SIGSEGV|processor time", edited.failure)
    assert 0 < work_of(edited) < 1.0
    _, others = apply([Row(grammars, text) for _ in range(9)])
    assert {row.failure for row in others} == {edited.failure}
    assert sum(map(work_of, others)) < 0.1, "nobody waits for that twice"
