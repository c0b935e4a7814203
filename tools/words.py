"""The pocket world's nouns: who lives in it, where they go, and what they own.

Only word lists and the values picked from them live here; sentences are in the files that use them.
"""

from dataclasses import dataclass
from random import Random


def listed(text: str, separator: str | None = None) -> list[str]:
    """The items that `text` holds between separators (whitespace unless given)."""
    return text.split(separator)


GIRLS = listed(
    "Lily Mia Anna Emma Rosa Nora Zoe Ella Lucy Ruby Ivy Maya Sara Nina Clara Alice Hana Lena Grace Amy"
)
BOYS = listed(
    "Tom Ben Max Sam Leo Jack Tim Finn Oscar Noah Hugo Omar Luca Paul Adam Theo Karl Ravi Dan Peter"
)
PET_NAMES = listed(
    "Pip Momo Bobo Coco Tilly Nibbles Fluffy Rusty Dot Biscuit Pepper Willow Sunny Pebble Hazel Milo"
)
ANIMALS = listed(
    "fox cat dog rabbit bear mouse duck frog owl squirrel hedgehog turtle pony bird lion "
    "elephant monkey goat sheep pig dragon kitten puppy deer penguin"
)
LITTLE = listed("little small kind brave curious shy happy clever quiet young cheerful gentle")
COLORS = listed("red blue green yellow white black orange purple pink brown golden silver")
TOYS = listed(
    "ball kite boat drum hat scarf book bell lamp cup whistle ring bag key shell spoon doll puzzle "
    "ribbon basket coin button flute map"
)
FOODS = (
    ("apple", "apples"), ("pear", "pears"), ("plum", "plums"), ("cookie", "cookies"), ("carrot", "carrots"),
    ("cake", "cakes"), ("berry", "berries"), ("nut", "nuts"), ("peach", "peaches"), ("banana", "bananas"),
    ("muffin", "muffins"), ("sandwich", "sandwiches"), ("lemon", "lemons"), ("cherry", "cherries"),
)  # fmt: skip
PLACES = (
    ("at", "park"), ("in", "forest"), ("in", "garden"), ("at", "beach"), ("by", "river"), ("in", "meadow"),
    ("on", "hill"), ("at", "farm"), ("at", "market"), ("by", "lake"), ("in", "village"), ("by", "pond"),
    ("in", "orchard"), ("in", "field"), ("at", "playground"),
)  # fmt: skip
SPOTS = (
    "under a big tree", "behind a rock", "in the tall grass", "under a bench", "inside an old box",
    "behind the fence", "under a pile of leaves", "next to a bush", "beside the path", "near the gate",
    "under a wooden bridge", "inside a hollow log",
)  # fmt: skip
CITIES = listed("Paris Rome London Oslo Berlin Madrid Tokyo Cairo Lima Delhi Boston Vienna")
JOBS = listed("baker teacher farmer doctor painter pilot singer cook sailor gardener driver writer")
HOBBIES = listed("reading painting swimming singing fishing dancing cooking running drawing chess")
FRUITS = [one for one, _ in FOODS if one in {"apple", "pear", "plum", "peach", "banana", "lemon", "cherry"}]
DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


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
