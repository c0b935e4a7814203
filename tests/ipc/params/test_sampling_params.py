"""SamplingParams: defaults, ranges, equivalents."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any

import msgspec
import numpy as np
import pytest
from quire.ipc.errors import SamplingParamsError
from quire.ipc.params.param_fields import ParamField
from quire.ipc.params.repetition_detection import RepetitionDetectionParams
from quire.ipc.params.sampling_params import (
    MAX_EXTRA_ARGS_BYTES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    SAMPLING_FIELDS,
    RequestOutputKind,
    SamplingParams,
)

FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs"]


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["a"] * (MAX_STOP_STRINGS + 1)),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("logit_bias", [1]),
        ("logit_bias", {1: float("nan")}),
        *(("logit_bias", {key: 1.0}) for key in ("x", " 1", "1_0", "+1", "-1", "01", "1.0", "\u0661", "")),
        ("allowed_token_ids", []),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("output_kind", 7),
        ("max_tokens", 10**5000),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {float("inf"): 1}),
        ("logit_bias", {2**31: 1}),
        ("logit_bias", {1.5: 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", {b"5": 1}),
        ("stop", "\ud800"),
        ("stop", ["fine", "a\ud800"]),
        ("stop", "x" * (MAX_STOP_LENGTH + 1)),
        ("bad_words", ["\ud800"]),
        ("stop_token_ids", b"ab"),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [np.True_]),
        ("stop_token_ids", [np.float32(1.0)]),
        ("stop_token_ids", [np.int64(2**31)]),
        ("allowed_token_ids", bytearray(b"ab")),
        ("logprob_token_ids", list(range(129))),
        ("logprob_token_ids", [-1]),
        *(("truncate_prompt_tokens", value) for value in (0, 0.0, -2, False, True, 1.5)),
        *(("truncation_side", value) for value in ("middle", 1, ["left"], None)),
        *(
            ("repetition_detection", value)
            for value in (5, [1], {}, {"max_pattern_size": 2}, {[].__len__: 1})
        ),
        ("repetition_detection", {"max_pattern_size": 64, "min_count": 65}),
    ],
    ids=lambda value: repr(value)[:40] if value != 10**5000 else "5001 digits",
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}=")


SCALARS = [field for field in SAMPLING_FIELDS.values() if field.kind in (int, float, bool)]


@pytest.mark.parametrize("field", SCALARS, ids=lambda field: field.name)
def test_a_number_or_switch_that_is_not_declared_is_refused_by_name_with_its_range(field: ParamField) -> None:
    refused: list[Any] = ["x", [1], {}]
    if field.kind is bool:
        refused += [1, 0.0]
    else:
        low, most = field.meta.ge, field.meta.le
        refused += [float("nan"), float("inf"), -float("inf"), most * 3 + 1, 10**400, 10**5000]
        refused += [field.meta.gt if low is None else low - 0.5 if field.kind is float else low - 1]
        refused += [] if "logprobs" in field.name else [True]  # which means 1 there
        refused += [1.5] if field.kind is int else []
    for value in refused:
        if (field.name, value) != ("seed", -1):
            with pytest.raises(SamplingParamsError, match=rf"^{field.name}=") as caught:
                SamplingParams(**{field.name: value})
            assert str(caught.value).endswith(field.describe_allowed(value)) or "truncate" in field.name


def test_what_is_allowed_is_said_with_its_bounds() -> None:
    for name, value, allowed in (
        ("max_tokens", 2**31, "an integer from 1 to 2147483647"),
        ("top_k", -2, "an integer from -1 to 2147483647"),
        ("temperature", 2.1, "a number from 0 to 2"),
        ("top_p", 0.0, "a number above 0 and up to 1"),
        ("ignore_eos", "yes", "True or False"),
    ):
        with pytest.raises(SamplingParamsError) as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert str(caught.value) == f"{name}={value!r}: expected {allowed}"


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_are_kept_as_plain_floats(name: str) -> None:
    for value in (1, np.float64(1.0)):
        assert type(getattr(SamplingParams(**{name: value}), name)) is float


def test_every_number_is_declared_with_a_range_and_a_text() -> None:
    assert list(SAMPLING_FIELDS) == list(SamplingParams.__struct_fields__)
    numbers = [field for field in SAMPLING_FIELDS.values() if field.kind in (int, float)]
    assert {*FLOATS, *INTEGERS, "n", "best_of", "seed"} <= {field.name for field in numbers}
    for field in numbers:
        meta = field.meta
        assert meta.description, field.name
        assert meta.le is not None, field.name
        assert (meta.ge is None) != (meta.gt is None), field.name


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids"])
@pytest.mark.parametrize("ids", [[np.int64(5), 6, np.uint8(7)], np.array([5, 6, 7]), (5, 6, 7)], ids=repr)
def test_integers_of_other_libraries_become_plain_ids(name: str, ids: object) -> None:
    kept = getattr(SamplingParams(**{name: ids}), name)  # type: ignore[arg-type]
    assert kept == [5, 6, 7]
    assert {type(one) for one in kept} == {int}


def test_a_biased_id_may_be_text_or_an_integral_number() -> None:
    assert SamplingParams(logit_bias={"5": 1, 6.0: 2, np.int64(7): 3}).logit_bias == {5: 1.0, 6: 2.0, 7: 3.0}  # type: ignore[dict-item]


class Word(str):
    """A subclass, of which messages know nothing; what it shows is not what it holds."""

    __slots__ = ()

    def __str__(self) -> str:
        return "shown"


class Choice(StrEnum):
    YES = "yes"


class Three(IntEnum):
    THREE = 3


class Half(float):
    pass


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({"stop": Word("held")}, "held"),
        ({"stop": Choice.YES}, "yes"),
        ({"stop": (Word("held"), Choice.YES, np.str_("n"))}, ["held", "yes", "n"]),
        ({"bad_words": [Word("held")]}, ["held"]),
        ({"n": Three.THREE}, 3),
        ({"max_tokens": np.int64(3)}, 3),
        ({"seed": np.uint64(3)}, 3),
        ({"top_k": np.array(3)}, 3),
        ({"logprobs": np.True_}, 1),
        ({"ignore_eos": np.True_}, True),
        ({"temperature": np.float32(0.5)}, 0.5),
        ({"min_p": Half(0.5)}, 0.5),
        ({"stop_token_ids": [Three.THREE]}, [3]),
        ({"allowed_token_ids": [Three.THREE]}, [3]),
        ({"logit_bias": {Three.THREE: Half(0.5)}}, {3: 0.5}),
        ({"logit_bias": {Word("3"): np.float32(0.5)}}, {3: 0.5}),
    ],
    ids=repr,
)
def test_what_stands_for_a_plain_value_becomes_one(fields: dict[str, Any], plain: object) -> None:
    (name,) = fields
    params = SamplingParams(**fields)
    assert repr(getattr(params, name)) == repr(plain)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    params = SamplingParams()
    setattr(params, name, fields[name])
    params.verify()
    assert repr(getattr(params, name)) == repr(plain)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": np.float32(2)},
        {"ignore_eos": np.int64(1)},
        {"temperature": np.True_},
        {"max_tokens": np.array([2])},
    ],
    ids=repr,
)
def test_a_value_of_another_kind_is_still_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SamplingParamsError):
        SamplingParams(**fields)


def test_a_text_at_the_cap_is_a_stop() -> None:
    assert SamplingParams(stop="x" * MAX_STOP_LENGTH).stop_strings == ["x" * MAX_STOP_LENGTH]


def test_a_bad_combination_is_refused() -> None:
    with pytest.raises(SamplingParamsError, match="min_tokens"):
        SamplingParams(min_tokens=17)
    with pytest.raises(SamplingParamsError, match="best_of"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(SamplingParamsError, match="stop"):
        SamplingParams(stop="a", detokenize=False)
    with pytest.raises(SamplingParamsError, match="logprobs=2: expected None or 0 with logprob_token_ids"):
        SamplingParams(logprobs=2, logprob_token_ids=[1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_pattern_size", 0),
        ("max_pattern_size", 65),
        ("max_pattern_size", True),
        ("max_pattern_size", 2.0),
        ("min_count", 1),
        ("min_count", 10**400),
        ("min_pattern_size", 3),
    ],
)
def test_a_bad_value_of_repetition_detection_is_refused_by_its_own_name(name: str, value: object) -> None:
    fields: dict[str, Any] = {"max_pattern_size": 2, "min_count": 2} | {name: value}
    for detection in (fields, RepetitionDetectionParams(**fields)):
        with pytest.raises(
            SamplingParamsError, match=rf"^repetition_detection\.{name}=.*: expected an integer from"
        ):
            SamplingParams(repetition_detection=detection)  # type: ignore[arg-type]


def test_prompt_logprobs_skip_the_prefix_cache_and_do_not_let_it_be_read() -> None:
    assert SamplingParams().reads_prefix_cache
    assert SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=True).reads_prefix_cache is False
    assert not SamplingParams(prompt_logprobs=0).reads_prefix_cache
    assert not SamplingParams(skip_reading_prefix_cache=True).reads_prefix_cache
    with pytest.raises(SamplingParamsError, match="skip_reading_prefix_cache=False: expected None or True"):
        SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False)


def test_greedy_turns_the_filters_off() -> None:
    params = SamplingParams(temperature=0.0, top_p=0.5, top_k=3, min_p=0.2)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert params.is_greedy


def test_equivalents_are_normalized() -> None:
    params = SamplingParams(
        temperature=1e-3, top_k=-1, seed=-1, logprobs=True, logit_bias={"5": 200}, stop_token_ids=[2, 2, 1]
    )
    assert params.temperature == 0.01
    assert params.top_k == 0
    assert params.seed is None
    assert params.logprobs == 1
    assert params.logit_bias == {5: 100.0}
    assert params.stop_token_ids == [2, 1]


def test_a_clone_shares_nothing_that_changes() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0})
    copy = params.clone()
    assert copy == params
    copy.stop.append("b")  # type: ignore[union-attr]
    copy.logit_bias[2] = 1.0  # type: ignore[index]
    assert params.stop == ["a"]
    assert params.logit_bias == {1: 1.0}


def test_a_wire_trip_changes_nothing_and_bad_values_do_not_decode() -> None:
    detection = {"max_pattern_size": 4, "min_count": 3}
    params = SamplingParams(
        n=2,
        temperature=0.7,
        stop=["a", "b"],
        seed=-5,
        logit_bias={7: -3.0},
        repetition_detection=detection,  # type: ignore[arg-type]
        skip_reading_prefix_cache=True,
    )
    assert params.repetition_detection == RepetitionDetectionParams(**detection)
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"temperature": 9.0}), type=SamplingParams)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"temprature": 1.0}), type=SamplingParams)


@pytest.mark.parametrize(
    "given", [[], "x", {1: 2}, {"a": float("nan")}, {"a": {1}}, {"a": "x" * MAX_EXTRA_ARGS_BYTES}]
)
def test_extra_args_are_plain_json_of_a_bounded_size(given: Any) -> None:
    with pytest.raises(SamplingParamsError, match=r"extra_args=.*plain JSON values of at most 8192 bytes"):
        SamplingParams(extra_args=given)
    plain = {"a": [1, 2.5, None, True, {"b": "ü"}]}
    params = SamplingParams(extra_args=plain)
    assert params.extra_args == plain
    assert params.clone().extra_args is not params.extra_args
