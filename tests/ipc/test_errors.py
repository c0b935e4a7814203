"""How errors read: the field, its value, what is expected, and why."""

from __future__ import annotations

import pytest
from quire.ipc.errors import FilesChangedError, InputError, describe_refusal

TEXTS = [
    ("an integer from 1", "n=0: expected an integer from 1"),
    ("expected `int`, got `str`", "n=0: expected `int`, got `str`"),
    ("no such field, did you mean 'm'?", "n=0: no such field, did you mean 'm'?"),
    ("only with stream=true", "n=0: only with stream=true"),
    ("none: use tools", "n=0: expected none: use tools"),
]


@pytest.mark.parametrize(("allowed", "text"), TEXTS)
def test_an_error_says_the_field_the_value_and_what_is_expected(allowed: str, text: str) -> None:
    assert str(InputError("n", 0, allowed)) == text
    assert describe_refusal("n", 0, allowed) == text


def test_a_changed_file_expects_nothing() -> None:
    assert str(FilesChangedError("a", "/a", "has changed")) == "a='/a': has changed"
