"""What is refused, and in which words: tests/golden/refusals/NAME.json, a list of [what is given, the text].

QUIRE_WRITE_GOLDEN=1 has the texts written anew, for a reviewer. What is long is {"repeat": [value, times]}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from quire.ipc.errors import QuireError

FOLDER = Path(__file__).parent / "golden" / "refusals"
ABSENT = "<absent>"  # in place of a value: the key is taken away


class Refusal(NamedTuple):
    """A case of a file."""

    name: str
    place: int
    given: Any
    text: str

    def check(self, call: Callable[[Any], object], folder: Path | None = None) -> Any:
        """The error of the user's that `call` raises: one line, with exactly this text, or one that begins so
        where it ends in '...': other libraries' words follow. `folder` is FOLDER in it.
        """
        try:
            call(_fill(self.given))
        except (ValueError, QuireError) as raised:
            error, text = raised, str(raised).replace(str(folder or "FOLDER"), "FOLDER")
        else:
            pytest.fail("it is taken")
        assert "\n" not in text
        if self.text.endswith("...") and text.startswith(self.text[:-3]):
            return error
        if os.environ.get("QUIRE_WRITE_GOLDEN"):
            cases = _read(self.name)
            cases[self.place][1] = text
            lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
            (FOLDER / f"{self.name}.json").write_text(f"[\n{lines}\n]\n")
            return error
        assert text == self.text, text
        return error


def refusals(name: str) -> pytest.MarkDecorator:
    """Has a test called with each `refusal` of a file."""
    cases = [Refusal(name, place, given, text) for place, (given, text) in enumerate(_read(name))]
    return pytest.mark.parametrize("refusal", cases, ids=lambda case: case.text[:80])


def run_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command that says nothing but an error, and raise that."""
    from quire.frontend.cli.entry import run_command

    assert run_command(arguments) in (1, 2)
    out, errors = capsys.readouterr()
    assert (out, errors[:14], errors[-1]) == ("", "quire: error: ", "\n")
    raise ValueError(errors[14:-1])


def drop_absent(values: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that a case takes away."""
    return {key: value for key, value in values.items() if value != ABSENT}


def _fill(value: Any) -> Any:
    match value:
        case {"repeat": [one, times]}:
            return _fill(one) * times
        case dict():
            return {name: _fill(one) for name, one in value.items()}
        case list():
            return [_fill(one) for one in value]
        case _:
            return value


def _read(name: str) -> list[Any]:
    return json.loads((FOLDER / f"{name}.json").read_bytes())
