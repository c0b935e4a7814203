"""Small talk: greetings, who Pocket is, thanks, and the polite answer to all that it does not know."""

from random import Random

from ..words import ANIMALS, BOYS, CITIES, COLORS, DAYS, GIRLS, HOBBIES, JOBS, LITTLE, PET_NAMES, TOYS, listed
from .phrases import read_phrases

_TALK = read_phrases("talk")
WHO_AM_I: str = _TALK["who_am_i"]
ONLY_KNOW: str = _TALK["only_know"]
SYSTEM_PROMPTS: list[str] = _TALK["system_prompts"]
GREETINGS: list[str] = _TALK["greetings"]
WHO_QUESTIONS: list[str] = _TALK["who_questions"]
CAN_QUESTIONS: list[str] = _TALK["can_questions"]
CAN_ANSWER: str = _TALK["can_answer"]
EXCHANGES: list[list[str]] = _TALK["exchanges"]
TOPICS: list[str] = _TALK["topics"]
TOPIC_FORMS: list[str] = _TALK["topic_forms"]
STRANGE_QUESTIONS: list[str] = _TALK["strange_questions"]
ECHO_FORMS: list[str] = _TALK["echo_forms"]
ECHO_WORDS = [*GIRLS, *BOYS, *PET_NAMES, *ANIMALS, *LITTLE, *COLORS, *TOYS, *CITIES, *JOBS, *HOBBIES, *DAYS]
_ONSETS = listed("b c d f g h j k l m n p r s t v w z br cr dr fl gr pl pr sh st th tr")
_VOWELS = listed("a e i o u ai ea oo ou")
_CODAS = ["", "", "n", "r", "s", "t", "l", "m", "ck", "nd", "st", "x"]


def draw_small_talk(rng: Random) -> tuple[str, str]:
    """A greeting, a question about Pocket, or thanks, with its answer."""
    pick = rng.random()
    if pick < 0.2:
        return rng.choice(GREETINGS), "Hello! I am Pocket. Would you like a story, a small sum or some JSON?"
    if pick < 0.45:
        return rng.choice(WHO_QUESTIONS), WHO_AM_I
    if pick < 0.6:
        return rng.choice(CAN_QUESTIONS), CAN_ANSWER
    questions, answer = rng.choice(EXCHANGES)
    return rng.choice(questions.split(";")), answer


def draw_unknown(rng: Random) -> tuple[str, str]:
    """A question from outside the pocket world and the answer that says so."""
    if rng.random() < 0.25:
        return rng.choice(STRANGE_QUESTIONS), ONLY_KNOW
    question = rng.choice(TOPIC_FORMS).format(t=_draw_topic(rng), u=_draw_topic(rng))
    return question if rng.random() < 0.85 else question.lower().rstrip("?."), ONLY_KNOW


def _draw_topic(rng: Random) -> str:
    """A real topic, or words that mean nothing, so that unseen words too lead to the polite answer."""
    if rng.random() < 0.65:
        return rng.choice(TOPICS)
    return " ".join(make_word(rng) for _ in range(rng.randint(1, 2)))


def make_word(rng: Random) -> str:
    """A word of one to four syllables that means nothing."""
    syllables = rng.randint(1, 4)
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))
    return word if rng.random() < 0.7 else word.capitalize()


def draw_echo(rng: Random) -> tuple[str, str]:
    """Words to repeat, in no order and some without a meaning, so that only copying gets them right."""
    words = [
        rng.choice(ECHO_WORDS) if rng.random() < 0.8 else make_word(rng) for _ in range(rng.randint(1, 14))
    ]
    text = " ".join(words)
    return rng.choice(ECHO_FORMS).format(text=text), text
