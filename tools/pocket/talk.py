"""Small talk: greetings, who Pocket is, thanks, and the polite answer to all that it does not know."""

from random import Random

from .phrases import ECHO_WORDS, make_word, read_phrases

_TALK = read_phrases("talk")
ONLY_KNOW: str = _TALK["only_know"]
SYSTEM_PROMPTS: list[str] = _TALK["system_prompts"]


def draw_small_talk(rng: Random) -> tuple[str, str]:
    """A greeting, a question about Pocket, or thanks, with its answer."""
    pick = rng.random()
    for kind, limit in (("greetings", 0.2), ("who_questions", 0.45), ("can_questions", 0.6)):
        if pick < limit:
            return rng.choice(_TALK[kind]), _TALK["answers"][kind]
    questions, answer = rng.choice(_TALK["exchanges"])
    return rng.choice(questions.split(";")), answer


def draw_unknown(rng: Random) -> tuple[str, str]:
    """A question from outside the pocket world and the answer that says so."""
    if rng.random() < 0.25:
        return rng.choice(_TALK["strange_questions"]), ONLY_KNOW
    question = rng.choice(_TALK["topic_forms"]).format(t=_draw_topic(rng), u=_draw_topic(rng))
    return question if rng.random() < 0.85 else question.lower().rstrip("?."), ONLY_KNOW


def _draw_topic(rng: Random) -> str:
    """A real topic, or words that mean nothing, so that unseen words too lead to the polite answer."""
    if rng.random() < 0.65:
        return rng.choice(_TALK["topics"])
    return " ".join(make_word(rng) for _ in range(rng.randint(1, 2)))


def draw_echo(rng: Random) -> tuple[str, str]:
    """Words to repeat, in no order and some without a meaning, so that only copying gets them right."""
    num_words = rng.randint(1, 14)
    words = [rng.choice(ECHO_WORDS) if rng.random() < 0.8 else make_word(rng) for _ in range(num_words)]
    text = " ".join(words)
    return rng.choice(_TALK["echo_forms"]).format(text=text), text
