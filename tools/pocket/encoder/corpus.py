"""The encoder's corpus: pairs of all kinds, drawn one by one from one `Random`. Nothing here tokenizes."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from ..stories import tell_story
from .concepts import WORDS, draw_related, draw_synonyms, replace_words
from .episodes import draw_episode
from .everyday import draw_everyday
from .facts import draw_fact
from .pairs import Pair, Passage
from .strange import draw_shared_words, misspell

_DRAWS = (draw_episode, draw_fact, draw_everyday, draw_synonyms, draw_related)
_SHARES = (0.25, 0.15, 0.28, 0.22, 0.1)
SHARED_WORDS_SHARE = 0.2
SYNONYM_SHARE, MISSPELLED_SHARE, CARELESS_SHARE = 0.15, 0.05, 0.3


def draw_pairs(seed: int) -> Iterator[Pair]:
    """Training pairs for `seed`, without an end. Queries are at times careless, as users' are."""
    rng = Random(seed)
    while True:
        pair = draw_shared_words(rng) if rng.random() < SHARED_WORDS_SHARE else _draw_meant(rng)
        yield replace(pair, query=_vary(rng, pair.query))


def draw_texts(seed: int, count: int) -> Iterator[str]:
    """Texts of words that exist, for the tokenizer; among them are all words with a meaning of their own."""
    rng = Random(seed)
    yield from WORDS
    for _ in range(count):
        pair = _draw_meant(rng)
        yield pair.query
        yield pair.answer.text
    for _ in range(count // 4):
        yield tell_story(rng).text


def draw_story_pairs(seed: int) -> Iterator[Pair]:
    """Pairs whose texts are long: whole stories of the pocket model's corpus."""
    rng = Random(seed)
    while True:
        story, other = tell_story(rng), tell_story(rng)
        question, answer = rng.choice(story.questions)
        query = rng.choice((answer, f"{question} {answer}", f"{question} A story about {story.subject}."))
        yield Pair(_vary(rng, query), Passage(story.text), Passage(other.text))


def _draw_meant(rng: Random) -> Pair:
    return rng.choices(_DRAWS, _SHARES)[0](rng)


def _vary(rng: Random, query: str) -> str:
    query = replace_words(rng, query, SYNONYM_SHARE)
    if rng.random() < MISSPELLED_SHARE:
        query = misspell(rng, query)
    return query.rstrip("?.!") if rng.random() < CARELESS_SHARE else query
