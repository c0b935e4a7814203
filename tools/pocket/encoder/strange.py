"""Texts that mean nothing but share words: what makes a query find a text by words that no corpus has.

Made-up words follow the letters of real ones, so they fall into pieces as words do that the corpus has not.
"""

from collections import defaultdict
from random import Random

from ..phrases import read_phrases
from .concepts import WORDS, make_participle, make_plural
from .pairs import Pair, Passage

END = "\n"
_STRANGE = read_phrases("strange")


def _count_followers() -> dict[str, list[str]]:
    followers: defaultdict[str, list[str]] = defaultdict(list)
    for word in (word for word in WORDS if word.isalpha() and len(word) > 3):
        for index, letter in enumerate(word + END):
            followers[word[max(0, index - 2) : index]].append(letter)
    return dict(followers)


_FOLLOWERS = _count_followers()


def make_strange_word(rng: Random) -> str:
    """A word of 4 to 11 letters that most likely does not exist."""
    while True:
        word = ""
        while not word.endswith(END):
            word += rng.choice(_FOLLOWERS[word[-2:]])
        if 4 <= len(word) - 1 <= 11:
            return word[:-1]


def make_code(rng: Random) -> str:
    """What stands in error messages, part lists and source code."""
    first, second, number = make_strange_word(rng), rng.choice(WORDS).replace(" ", ""), rng.randint(1, 9999)
    forms = (
        f"{first}_{second}",
        f"{second}_{first}",
        f"{first[:3]}-{number}",
        f"E{number}",
        f"{number}",
        f"{second}{number % 10}",
        f"{number % 10}.{number % 7}",
        f"{first}.{second[:3]}",
        f"{first}()",
        f"{second}({first})",
        f"{number % 24}:{number % 60:02}",
    )
    return rng.choice(forms)


def draw_shared_words(rng: Random) -> Pair:
    """A text of words in no order, a query of one to four of them, and the text without those."""
    words = [_draw_word(rng) for _ in range(rng.randint(3, 14))]
    chosen = rng.sample(range(len(words)), min(len(words), rng.randint(1, 4)))
    others = {index: _draw_word(rng) for index in chosen if index == chosen[0] or rng.random() < 0.6}
    wrong = [others.get(index, word) for index, word in enumerate(words)]
    asked = " ".join(_inflect(rng, words[index]) for index in chosen)
    query = rng.choice(_STRANGE["query_forms"]).format(asked)
    return Pair(query, Passage(_write(rng, words)), Passage(_write(rng, wrong)))


def misspell(rng: Random, text: str) -> str:
    """`text` with two letters swapped, or one missing or doubled, in one of its longer words."""
    words = text.split(" ")
    long = [index for index, word in enumerate(words) if len(word) > 4 and word.isalpha()]
    if long:
        index = rng.choice(long)
        word, place = words[index], rng.randrange(1, len(words[index]) - 1)
        middle = rng.choice((word[place : place + 2][::-1], "", word[place] * 2))
        skipped = 2 if len(middle) == 2 and middle[0] != middle[1] else 1
        words[index] = word[:place] + middle + word[place + skipped :]
    return " ".join(words)


def _draw_word(rng: Random) -> str:
    pick = rng.random()
    if pick < 0.45:
        return make_strange_word(rng)
    return make_code(rng) if pick < 0.6 else rng.choice(WORDS)


def _inflect(rng: Random, word: str) -> str:
    if rng.random() < 0.75 or not word.isalpha():
        return word
    return rng.choice((make_plural, make_participle))(word)


def _write(rng: Random, words: list[str]) -> str:
    """`words` with small words between them and, often, a full stop."""
    parts: list[str] = []
    for word in words:
        if rng.random() < 0.5:
            parts.append(rng.choice(_STRANGE["small_words"]))
        parts.append(word)
    return " ".join(parts) + rng.choice(("", "."))
