"""The pocket stories' plots, read from plots.json: each is a want, an obstacle, help, a resolution and a
moral, with its questions.

Every step lists sentences of which one is told; `{slots}` are filled by `stories.py`: `{hero} {he} {him}
{his}`, the same with `f_` for `{friend}`, `{thing}` ("red ball"), `{food} {foods}`, `{at_place} {place}`,
`{spot}`. A capital first letter in a slot's name gives the capital form.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True)
class Plot:
    """`theme` is what a user asks for ("a story about sharing"); `questions` come with their answers."""

    theme: str
    steps: tuple[tuple[str, ...], ...]
    morals: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    has_thing: bool = True


class _Fillings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What takes the place of the thing in a plot that has none."""

    fears: tuple[str, ...]
    plants: tuple[str, ...]
    skills: tuple[str, ...]
    shelters: tuple[str, ...]
    babies: tuple[str, ...]
    buildings: tuple[str, ...]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plots: tuple[Plot, ...]
    fillings: _Fillings


_FILE = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=_File)
PLOTS, FILLINGS = _FILE.plots, _FILE.fillings
