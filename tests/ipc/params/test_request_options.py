"""RequestOptions: what a field's declaration alone gives."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest
from msgspec import Meta
from quire.ipc.errors import InputError
from quire.ipc.params.param_fields import read_fields


class Options(msgspec.Struct):
    word: Annotated[str, Meta(max_length=4)] = ""


def test_a_text_is_checked_by_its_declared_length_and_refused_by_name() -> None:
    field = read_fields(Options, InputError)["word"]
    assert field.check("four") == "four"
    for value in ("fives", 4, None):
        with pytest.raises(InputError, match=r"word=.*a text of 0 to 4 characters"):
            field.check(value)
