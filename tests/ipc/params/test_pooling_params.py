"""PoolingParams: defaults, ranges, what goes together."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from quire.ipc.errors import PoolingParamsError
from quire.ipc.params.pooling_params import POOLING_FIELDS, PoolingParams


def test_defaults_are_vllms_and_cost_no_bytes() -> None:
    params = PoolingParams()
    assert (params.task, params.dimensions, params.use_activation) == (None, None, None)
    assert params.is_activated
    assert params.reads_prefix_cache
    assert msgspec.msgpack.encode(params) == b"\x80"


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("task", "score", "one of 'embed', 'classify', 'token_embed', 'token_classify'"),
        ("task", 1, "one of 'embed'"),
        ("dimensions", 0, "an integer from 1 to 2147483647"),
        ("dimensions", True, "an integer from 1"),
        ("dimensions", 1.5, "an integer from 1"),
        ("use_activation", 1, "True or False"),
        ("skip_reading_prefix_cache", "no", "True or False"),
        ("truncate_prompt_tokens", 0, "-1, or an integer from 1 to 2147483647"),
        ("truncate_prompt_tokens", -2, "an integer from -1"),
        ("truncation_side", "middle", "one of 'left', 'right'"),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object, allowed: str) -> None:
    with pytest.raises(PoolingParamsError) as caught:
        PoolingParams(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{field}={value!r}: expected {allowed}")


@pytest.mark.parametrize("name", ["normalize", "softmax", "activation"])
def test_vllms_older_names_of_the_activation_are_taken(name: str) -> None:
    given: Any = {name: False}
    params = PoolingParams(task="embed", **given)
    assert params == PoolingParams(task="embed", use_activation=False)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=PoolingParams) == params
    assert PoolingParams(**dict.fromkeys(given)) == PoolingParams()
    with pytest.raises(TypeError, match="normalise"):
        PoolingParams(normalise=True)  # type: ignore[call-arg]


def test_fields_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(PoolingParamsError, match="dimensions=8: expected absent with task='classify'"):
        PoolingParams(task="classify", dimensions=8)
    with pytest.raises(PoolingParamsError, match=r"skip_reading_prefix_cache=False: .*needs every position"):
        PoolingParams(task="token_embed", skip_reading_prefix_cache=False)


def test_token_wise_tasks_compute_the_whole_prompt() -> None:
    assert not PoolingParams(task="token_embed").reads_prefix_cache
    assert PoolingParams(task="embed").reads_prefix_cache
    assert not PoolingParams(task="embed", skip_reading_prefix_cache=True).reads_prefix_cache


def test_values_of_other_libraries_become_plain() -> None:
    given: Any = {"dimensions": np.int64(8), "use_activation": np.bool_(False)}
    params = PoolingParams(task=np.str_("embed"), **given)  # type: ignore[arg-type]
    assert [type(value) for value in (params.task, params.dimensions, params.use_activation)] == [
        str,
        int,
        bool,
    ]


def test_every_number_is_declared_with_a_range_and_every_field_with_a_text() -> None:
    assert list(POOLING_FIELDS) == list(PoolingParams.__struct_fields__)
    for field in POOLING_FIELDS.values():
        assert field.meta.description, field.name
        assert field.kind is not int or field.meta.le is not None, field.name


def test_what_is_sent_is_checked_again_on_decoding() -> None:
    params = PoolingParams(task="embed", dimensions=8, use_activation=False)
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=PoolingParams) == params
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"dimensions": 0}), type=PoolingParams)


def test_a_clone_is_equal() -> None:
    params = PoolingParams(task="embed", dimensions=8)
    assert params.clone() == params
