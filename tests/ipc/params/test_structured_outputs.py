"""StructuredOutputsParams: what is refused without reading a schema or a grammar."""

from __future__ import annotations

from typing import Any

import pytest
from quire import SamplingParams, StructuredOutputsParams
from quire.ipc.errors import SamplingParamsError
from quire.ipc.params.structured_outputs import MAX_CHOICES, RENAMED_FIELDS
from quire.ipc.protocol.token_lists import drop_packed, has_unpacked


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs='none of them': expected exactly one of json, regex, choice"),
        ({"json": "{}", "regex": "a"}, "structured_outputs='json, regex': expected exactly one"),
        ({"json": {}}, "structured_outputs.json={}: expected a JSON schema that is not empty"),
        ({"json": 3}, "structured_outputs.json=3: expected a JSON schema"),
        ({"regex": ""}, "structured_outputs.regex='': expected a regular expression that is not empty"),
        ({"regex": "a\0"}, "structured_outputs.regex='a\\x00': expected a text without NUL characters"),
        ({"grammar": ""}, "structured_outputs.grammar='': expected a grammar that is not empty"),
        ({"choice": []}, "structured_outputs.choice=[]: expected a list of 1 to 10000 texts"),
        ({"choice": ["a", ""]}, "structured_outputs.choice[1]='': expected a text that is not empty"),
        (
            {"choice": ["a"] * (MAX_CHOICES + 1)},
            "structured_outputs.choice='10001 texts': expected at most 10000",
        ),
        ({"json_object": False}, "structured_outputs.json_object=False: expected True"),
        ({"structural_tag": ""}, "structured_outputs.structural_tag='': expected a structural tag"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern=' ': only with json, json_object"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace=True: only with json"),
        (
            {"json_object": True, "disable_any_whitespace": 1},
            "disable_any_whitespace=1: expected True or False",
        ),
        (
            {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "whitespace_pattern=' ': expected None with disable_any_whitespace",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_used_is_refused_with_its_name(fields: dict[str, Any], message: str):
    with pytest.raises(SamplingParamsError) as caught:
        StructuredOutputsParams(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", RENAMED_FIELDS)
def test_a_field_of_another_name_today_is_refused_with_that(name: str):
    fields: dict[str, Any] = {name: {}}
    with pytest.raises(SamplingParamsError, match=f"no such field: it is {RENAMED_FIELDS[name]}"):
        SamplingParams(**fields)


def test_an_unknown_field_is_no_renamed_one():
    fields: dict[str, Any] = {"temprature": 1}
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(**fields)


def test_what_is_no_structured_outputs_params_is_refused():
    wrong: Any = {"json": "{}"}
    with pytest.raises(SamplingParamsError, match="None or StructuredOutputsParams"):
        SamplingParams(structured_outputs=wrong)


def test_the_wire_has_the_grammar_in_their_place():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert params.structured_outputs is not None
    assert params.structured_outputs.kind == "regex"
    assert has_unpacked(params)
    drop_packed(params)
    assert params.structured_outputs is None
