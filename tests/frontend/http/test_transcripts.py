"""Every dialect by its golden transcripts; `QUIRE_WRITE_GOLDEN=1` has them written anew, for a reviewer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from dialect_transcripts import FOLDER, open_transcript, read_cases, write_cases
from transcript_judges import judge

CASES = [
    (name, case["case"])
    for name in sorted(one.stem for one in FOLDER.glob("*.json"))
    for case in read_cases(name)
]


@pytest.mark.parametrize(("dialect", "name"), CASES, ids=[f"{dialect}: {name}" for dialect, name in CASES])
async def test_what_is_asked_has_the_answers_of_its_transcript(
    dialect: str, name: str, tmp_path: Path
) -> None:
    cases = read_cases(dialect)
    (case,) = [one for one in cases if one["case"] == name]
    transcript = open_transcript(case, tmp_path)
    turns: list[dict[str, Any]] = [await transcript.run_turn(turn) for turn in case["turns"]]
    transcript.app.check_ended()
    for turn in turns:
        judge(turn)
    if os.environ.get("QUIRE_WRITE_GOLDEN"):
        pairs = zip(case["turns"], turns, strict=True)
        case["turns"] = [old if old == new else new for old, new in pairs]  # of equal ones the lines stay
        write_cases(dialect, cases)
    assert turns == case["turns"]
