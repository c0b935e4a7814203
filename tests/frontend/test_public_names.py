"""What users import is there, and the documents name it as it is."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import quire

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from-vllm.md").read_text()
ROW = re.compile(r"^\| (?P<theirs>`vllm\.[^|]+) \| `(?P<ours>quire\.[\w.]+)`", re.M)
ROWS = [(match["theirs"], match["ours"]) for match in ROW.finditer(PAGE)]


@pytest.mark.parametrize("ours", [ours for _, ours in ROWS])
def test_a_name_beside_one_of_vllms_can_be_imported(ours: str):
    module, _, name = ours.rpartition(".")
    assert getattr(importlib.import_module(module), name) is not None


def test_a_name_of_vllms_stands_once_and_leads_to_the_name_that_it_ends_in():
    pairs = [(path, ours) for theirs, ours in ROWS for path in re.findall(r"`([\w.]+)`", theirs)]
    assert len(pairs) == len({path for path, _ in pairs}) > 50
    renamed = {path for path, ours in pairs if path.rpartition(".")[2] != ours.rpartition(".")[2]}
    others = ("vllm.exceptions.VLLMValidationError", "vllm.tokenizers.", "vllm.transformers_utils.")
    assert all(path.startswith(others) for path in renamed)


def test_every_public_name_is_there_and_listed():
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    assert set(quire.__all__) <= set(dir(quire))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = quire.Nothing
