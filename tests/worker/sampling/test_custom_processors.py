"""An operator's logits processors: made of a request, or resumed, and run for their own row alone."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

import msgspec
import numpy as np
import own_processors
import pytest
import torch
from own_processors import Fails, Only, Unlike
from quire.ipc.errors import ConfigError
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.step import NewRequestData
from quire.ipc.protocol.token_ids import encode_token_ids
from quire.ipc.protocol.token_lists import TokenLists
from quire.worker.sampling.logit_edits import apply_logit_edits
from quire.worker.sampling.logits_processor import LogitsProcessor, LogitsRequest, load_logits_processors
from quire.worker.steps.request_rows import RequestRows
from torch import Tensor

VOCAB_SIZE = 12
KINDS = (Unlike, Only, Fails)


def make_rows(kinds: tuple[type[LogitsProcessor], ...] = KINDS) -> RequestRows:
    return RequestRows(4, 32, VOCAB_SIZE, processors=kinds)


def enter(rows: RequestRows, row: int, output: list[int] | None = None, **extra_args: Any) -> None:
    packed = encode_token_ids([3, 4]), encode_token_ids(output or [])
    params = SamplingParams(temperature=0.0)
    extra = msgspec.json.encode(extra_args).decode() if extra_args else ""
    rows.enter(NewRequestData(row, "r", *packed, params, [], TokenLists(), [], 0, extra_args=extra))


def edit(rows: RequestRows, count: int) -> Tensor:
    """The logits of rows 0 to count - 1 after their edits; before them they are all 1."""
    logits = torch.ones(count, VOCAB_SIZE)
    apply_logit_edits(logits, rows.make_sampling_batch(np.arange(count)).edited)
    return logits


def test_only_the_rows_that_ask_are_edited_and_only_they_leave_the_greedy_way() -> None:
    rows = make_rows()
    enter(rows, 0)
    enter(rows, 1, only=[5, 6])
    enter(rows, 2, unlike=1)
    assert rows.is_greedy[:3].tolist() == [True, False, False]
    assert rows.needs_history[:3].tolist() == [False, False, True]
    logits = edit(rows, 3)
    assert logits[0].tolist() == [1.0] * VOCAB_SIZE
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [5, 6]
    assert logits[2].tolist() == [1.0] * 3 + [3.0] + [1.0] * 8


def test_a_resumed_request_is_where_it_was() -> None:
    rows = make_rows()
    enter(rows, 0, unlike=2)
    for token in (7, 8, 9):
        rows.append_sampled(np.array([0]), np.array([token]))
    enter(rows, 1, output=[7, 8, 9], unlike=2)
    logits = edit(rows, 2)
    assert logits[0].isneginf().nonzero().flatten().tolist() == [8, 9]
    assert torch.equal(logits[0], logits[1])


def test_without_classes_what_a_request_says_is_not_read() -> None:
    rows = make_rows(())
    enter(rows, 0, only=[5], unlike=1)
    assert rows.is_greedy[0]
    assert rows.edits[0] == []


def test_logits_of_another_shape_are_an_error_that_names_the_class() -> None:
    class TooShort(Only):
        def apply(self, logits: Tensor) -> Tensor:
            return logits[:3]

    rows = make_rows((TooShort,))
    enter(rows, 0, only=[1])
    [(failure, _)] = find_failures(rows, 1)
    assert failure == "ValueError: TooShort.apply returned logits of shape [3], not [12]"


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Misbehaves(LogitsProcessor):
    """extra_args {"how": what it does}."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._kept: Tensor | None = None

    @classmethod
    def for_request(cls, request: LogitsRequest) -> Self | None:
        if request.extra_args["how"] == "is not made":
            raise LookupError("no such word")
        return cls(request.extra_args["how"])

    def append(self, token_id: int) -> None:
        if self._kept is not None:
            self._kept.fill_(7.0)
        if self._how == "cannot append":
            raise KeyError(token_id)

    def apply(self, logits: Tensor) -> Tensor | None:
        match self._how:
            case "raises":
                logits.fill_(3.0)
                raise LookupError("x" * 1_000_000)
            case "raises what cannot be shown":
                raise Broken
            case "exits":
                sys.exit(3)
            case "is no tensor":
                return [1.0] * VOCAB_SIZE  # type: ignore[return-value]
            case "shrinks":
                logits.resize_(3)
            case "writes beyond its row":
                base = logits if logits._base is None else logits._base
                base.view(-1).fill_(9.0)
            case "keeps its row":
                self._kept = logits
            case "has no numbers":
                logits.fill_(torch.nan)
        return None


FAILING = {
    "is not made": "LookupError: no such word",
    "cannot append": "KeyError: 5",
    "raises": "LookupError: " + 1000 * "x",
    "raises what cannot be shown": "Broken",
    "exits": "SystemExit: 3",
    "is no tensor": "AttributeError: 'list' object has no attribute 'shape'",
    "shrinks": "ValueError: Misbehaves.apply returned logits of shape [3], not [12]",
}


@pytest.mark.parametrize("how", [*FAILING, "writes beyond its row", "keeps its row", "has no numbers"])
def test_what_a_processor_does_is_its_own_rows(how: str) -> None:
    rows = make_rows((Misbehaves,))
    for row, word in enumerate(("well", how, "well")):
        enter(rows, row, how=word)
    for _ in range(2):
        logits, batch = torch.ones(3, VOCAB_SIZE), rows.make_sampling_batch(np.arange(3))
        apply_logit_edits(logits, batch.edited)
        assert torch.equal(logits[[0, 2]], torch.ones(2, VOCAB_SIZE))
        for row in range(3):
            rows.append_sampled(np.array([row]), np.array([5]))
        assert torch.equal(logits[[0, 2]], torch.ones(2, VOCAB_SIZE))
    expected = FAILING.get(how, "")
    assert find_failures(rows, 3) == [("", False), (expected, bool(expected)), ("", False)]


def test_arguments_that_are_no_object_fail_their_own_row() -> None:
    rows = make_rows()
    for row, text in enumerate(('{"only": [3]}', "{", "[]", "7")):
        packed = encode_token_ids([3, 4]), b""
        params = SamplingParams(temperature=0.0)
        rows.enter(NewRequestData(row, "r", *packed, params, [], TokenLists(), [], 0, extra_args=text))
    assert [is_poison for _, is_poison in find_failures(rows, 4)] == [False, True, True, True]


def find_failures(rows: RequestRows, count: int) -> list[tuple[str, bool]]:
    batch = rows.make_sampling_batch(np.arange(count))
    apply_logit_edits(torch.ones(count, VOCAB_SIZE), batch.edited)
    return [(row.failure, row.is_poison) for row in batch.edited]


def test_classes_are_loaded_in_their_order() -> None:
    names = ["own_processors:Only", "own_processors:Unlike"]
    assert load_logits_processors(names, []) == (own_processors.Only, own_processors.Unlike)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own_processors:Missing", "has no attribute 'Missing'"),
        ("no_such_module:Only", "No module named 'no_such_module'"),
        ("own_processors:not_a_class", "not a subclass of quire.LogitsProcessor"),
        ("own_processors:Unfinished", "it does not define apply"),
    ],
)
def test_what_is_no_such_class_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"logits_processors='{name}'.*{reason}"):
        load_logits_processors([name], [])


def test_a_processor_may_ask_for_what_a_request_says() -> None:
    asked = LogitsRequest(SamplingParams(), {"fails_at": 2}, [1], [], VOCAB_SIZE)
    assert Fails.for_request(asked) is not None
    assert Only.for_request(asked) is None


class Busy(LogitsProcessor):
    """Computes for a while, as a request asks for: before its first token, with each, or in each step."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._asked = asked

    @classmethod
    def for_request(cls, request: LogitsRequest) -> Busy | None:
        if not request.extra_args:
            return None
        compute(request.extra_args.get("starts", 0))
        return cls(request.extra_args)

    def append(self, token_id: int) -> None:
        del token_id
        compute(self._asked.get("appends", 0))

    def apply(self, logits: Tensor) -> None:
        del logits
        compute(self._asked.get("applies", 0))


def compute(milliseconds: int) -> None:
    end = time.thread_time() + milliseconds / 1e3
    while time.thread_time() < end:
        pass


def test_what_a_processor_computes_is_noted_for_its_row_in_the_next_step() -> None:
    rows = make_rows((Busy,))
    enter(rows, 0, applies=3)
    enter(rows, 1, starts=5)
    enter(rows, 2, appends=7)
    enter(rows, 3)
    noted: list[list[float]] = []
    for _ in range(2):
        batch = rows.make_sampling_batch(np.arange(4))
        apply_logit_edits(torch.ones(4, VOCAB_SIZE), batch.edited)
        assert [row.index for row in batch.edited] == [0, 1, 2], "who asks for nothing is not measured"
        noted.append([row.work_us / 1e3 for row in batch.edited])
        rows.append_sampled(np.arange(4), np.full(4, 5))
    for step, least in zip(noted, ([3, 5, 0], [3, 0, 7]), strict=True):
        assert all(few <= took < few + 3 for took, few in zip(step, least, strict=True)), noted
