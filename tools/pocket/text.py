"""The corpus: raw stories, bare sums and conversations, drawn document by document from one `Random`.

A conversation is a list of messages; the chat template is applied by who trains. Nothing here tokenizes.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import TypeAlias

from .json_tasks import draw_json_task
from .reading import Turn, read_sentences, read_story
from .stories import Story, tell_story
from .sums import draw_sum, draw_sum_line, draw_sum_turn
from .talk import SYSTEM_PROMPTS, draw_echo, draw_small_talk, draw_unknown
from .words import BOYS, FOODS, GIRLS
from .words import pick_animal as animal

Messages: TypeAlias = list[dict[str, str]]
Document: TypeAlias = str | Messages

STORY_REQUESTS = (
    "Tell me a story about {s}.",
    "Tell me a story about {s}.",
    "tell me a story about {s}",
    "Tell me a short story about {s}.",
    "Please tell me a story about {s}.",
    "Can you tell me a story about {s}?",
    "Write a story about {s}.",
    "Write a short story about {s}.",
    "I want to hear a story about {s}.",
    "A story about {s}, please.",
)
ANY_STORY_REQUESTS = (
    "Tell me a story.",
    "Tell me a short story.",
    "Tell me a bedtime story.",
    "Write a story.",
    "Write a short story for me.",
    "Another story, please.",
    "Can you tell me a story?",
    "I would like to hear a story.",
)


def draw_documents(seed: int) -> Iterator[Document]:
    """The training corpus for `seed`, without an end: raw text as `str`, conversations as messages."""
    rng = Random(seed)
    while True:
        pick = rng.random()
        if pick < 0.26:
            yield tell_story(rng).text
        elif pick < 0.31:
            yield draw_sum_line(rng)
        else:
            yield draw_conversation(rng)


def draw_conversation(rng: Random) -> Messages:
    """One to four exchanges, one in eight after a system message."""
    messages: Messages = []
    if rng.random() < 0.125:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    num_exchanges = rng.choices((1, 2, 3, 4), (0.5, 0.2, 0.15, 0.15))[0]
    while num_exchanges > 0:
        turns = rng.choices(_TURNS, _SHARES)[0](rng)
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        num_exchanges -= len(turns)
    return messages


def _tell_on_request(rng: Random) -> list[Turn]:
    """A story that the user asks for, and often a question about it afterwards."""
    if rng.random() < 0.25:
        story, request = tell_story(rng), rng.choice(ANY_STORY_REQUESTS)
    else:
        story = _tell_about_kind(rng)
        request = rng.choice(STORY_REQUESTS).format(s=story.subject)
    turns = [(request, story.text)]
    if rng.random() < 0.4:
        turns.append(rng.choice(story.questions))
    return turns


def _tell_about_kind(rng: Random) -> Story:
    """A story; animals are heroes more often than elsewhere, because users ask for them."""
    if rng.random() < 0.5:
        hero = animal(rng, rng.random() < 0.5, named=rng.random() < 0.6)
        return tell_story(rng, hero, says_kind=True)
    return tell_story(rng, says_kind=True)


def _draw_word_problem(rng: Random) -> list[Turn]:
    """A sum told in words, with small numbers."""
    drawn = draw_sum(rng, is_minus=rng.random() < 0.3)
    while max(drawn.a, drawn.b) > 20 or min(drawn.a, drawn.b) < 2:
        drawn = draw_sum(rng, drawn.is_minus)
    name, foods = rng.choice(GIRLS + BOYS), rng.choice(FOODS)[1]
    he = "she" if name in GIRLS else "he"
    change = "eats" if drawn.is_minus else rng.choice(("gets", "finds", "buys"))
    amount = str(drawn.b) if drawn.is_minus else f"{drawn.b} more"
    form = "{a} minus {b} is {c}" if drawn.is_minus else "{a} plus {b} is {c}"
    question = (
        f"{name} has {drawn.a} {foods}. {he.capitalize()} {change} {amount}. "
        f"How many {foods} does {he} have now?"
    )
    return [(question, f"{drawn.fill(form)}, so {name} has {drawn.result} {foods}.")]


def _draw_sums(rng: Random) -> list[Turn]:
    return [draw_sum_turn(rng) for _ in range(rng.randint(1, 4))]


def _draw_json(rng: Random) -> list[Turn]:
    task = draw_json_task(rng)
    return [(task.prompt, task.answer)]


_TURNS: tuple[Callable[[Random], list[Turn]], ...] = (
    _tell_on_request,
    read_story,
    read_sentences,
    _draw_word_problem,
    _draw_sums,
    _draw_json,
    lambda rng: [draw_small_talk(rng)],
    lambda rng: [draw_unknown(rng)],
    lambda rng: [draw_echo(rng)],
)
_SHARES = (0.11, 0.06, 0.11, 0.02, 0.31, 0.24, 0.04, 0.06, 0.05)
