"""The pocket world's nouns: who lives in it, where they go, and what they own.

The lists are in words.json; values picked from them are made here, sentences in the files that use them.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec

WORDS: dict[str, Any] = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes())
GIRLS: list[str] = WORDS["girls"]
BOYS: list[str] = WORDS["boys"]
PET_NAMES: list[str] = WORDS["pet_names"]
ANIMALS: list[str] = WORDS["animals"]
LITTLE: list[str] = WORDS["little"]
COLORS: list[str] = WORDS["colors"]
TOYS: list[str] = WORDS["toys"]
FOODS: list[tuple[str, str]] = WORDS["foods"]
PLACES: list[tuple[str, str]] = WORDS["places"]
SPOTS: list[str] = WORDS["spots"]
CITIES: list[str] = WORDS["cities"]
JOBS: list[str] = WORDS["jobs"]
HOBBIES: list[str] = WORDS["hobbies"]
FRUITS = [
    name for name, _ in FOODS if name in {"apple", "pear", "plum", "peach", "banana", "lemon", "cherry"}
]
DAYS: list[str] = WORDS["days"]


@dataclass(frozen=True, slots=True)
class Character:
    """Someone in a story. `ref` is how the text names them ("Lily", "the fox"), `kind` what they are."""

    ref: str
    kind: str
    female: bool

    @property
    def is_named(self) -> bool:
        """Whether `ref` is a name."""
        return not self.ref.startswith("the ")

    def slots(self, prefix: str = "") -> dict[str, str]:
        """Pronouns and names for templates: `{hero}`, `{he}`, `{him}`, `{his}`, each with a capital twin."""
        he, him, his = ("she", "her", "her") if self.female else ("he", "him", "his")
        words = {"he": he, "him": him, "his": his, "kind": self.kind}
        slots = {prefix + key: word for key, word in words.items()}
        return slots | {(prefix + key).capitalize(): word.capitalize() for key, word in words.items()}


def a(noun: str) -> str:
    """`noun` with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capital(text: str) -> str:
    """`text` with its first letter in upper case, the rest untouched."""
    return text[:1].upper() + text[1:]


def join_and(items: list[str]) -> str:
    """`items` as English writes a list: "a", "a and b", "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def pick_child(rng: Random, female: bool) -> Character:
    """A child with a name of its gender."""
    return Character(rng.choice(GIRLS if female else BOYS), "girl" if female else "boy", female)


def pick_animal(rng: Random, female: bool, named: bool, kind: str | None = None) -> Character:
    """An animal of this kind (None: of any), with a name or as "the fox"."""
    kind = kind or rng.choice(ANIMALS)
    return Character(rng.choice(PET_NAMES) if named else f"the {kind}", kind, female)
