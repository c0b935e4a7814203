"""SamplingParams: defaults, ranges, equivalents."""

from __future__ import annotations

import msgspec
import pytest
from quire.ipc.errors import SamplingParamsError
from quire.ipc.sampling_params import MAX_N, MAX_STOP_STRINGS, RequestOutputKind, SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", MAX_N + 1),
        ("n", 1.5),
        ("n", True),
        ("best_of", 0),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("seed", "x"),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["a"] * (MAX_STOP_STRINGS + 1)),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("ignore_eos", "yes"),
        ("logprobs", -2),
        ("prompt_logprobs", 1.0),
        ("logit_bias", [1]),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {"x": 1.0}),
        ("allowed_token_ids", []),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("output_kind", 7),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}=")


def test_a_bad_combination_is_refused() -> None:
    with pytest.raises(SamplingParamsError, match="min_tokens"):
        SamplingParams(min_tokens=17)
    with pytest.raises(SamplingParamsError, match="best_of"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(SamplingParamsError, match="stop"):
        SamplingParams(stop="a", detokenize=False)


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
    params = SamplingParams(n=2, temperature=0.7, stop=["a", "b"], seed=-5, logit_bias={7: -3.0})
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"temperature": 9.0}), type=SamplingParams)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"temprature": 1.0}), type=SamplingParams)
