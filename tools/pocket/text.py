"""The corpus: raw stories, bare sums and conversations, drawn document by document from one `Random`.

A conversation is a list of messages; the chat template is applied by who trains. Nothing here tokenizes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

from ..words import BOYS, FOODS, GIRLS
from ..words import pick_animal as animal
from .calls import CALCULATOR, LOOKUP, OTHERS, Message, Offer, draw_calls, draw_offers, exchange_calls
from .json_tasks import draw_copying_task, draw_json_task
from .phrases import read_phrases
from .reading import Turn, read_sentence, read_sentences, read_story
from .stories import Story, tell_story
from .sums import ADD_FORMS, TAKE_FORMS, draw_sum, draw_sum_line, draw_sum_turn
from .talk import ONLY_KNOW, SYSTEM_PROMPTS, draw_echo, draw_small_talk, draw_unknown
from .thoughts import (
    ANSWER_AT_ONCE,
    think_about_calls,
    think_about_results,
    think_about_sum,
    think_about_text,
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that ends with the assistant. thought: what it thinks before its last message."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    thought: str | None = None


Document: TypeAlias = str | Chat

TOOLS_SHARE, THINKING_SHARE = 0.36, 0.2  # of the conversations
CALLS_SHARE = 0.75  # of the exchanges where tools are offered

_REQUESTS = read_phrases("requests")
STORY_REQUESTS: list[str] = _REQUESTS["story_requests"]
ANY_STORY_REQUESTS: list[str] = _REQUESTS["any_story_requests"]


def draw_documents(seed: int) -> Iterator[Document]:
    """The training corpus for `seed`, without an end: raw text as `str`, conversations as `Chat`."""
    rng = Random(seed)
    while True:
        pick = rng.random()
        if pick < 0.2:
            yield tell_story(rng).text
        elif pick < 0.25:
            yield draw_sum_line(rng)
        else:
            yield draw_conversation(rng)


def draw_conversation(rng: Random) -> Chat:
    """One to four exchanges, one in eight after a system message."""
    offers = draw_offers(rng) if rng.random() < TOOLS_SHARE else []
    messages: list[Message] = []
    if rng.random() < 0.125:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    is_thinking = rng.random() < THINKING_SHARE
    num_exchanges = rng.choices((1, 2, 3, 4), (0.65, 0.25, 0.1, 0) if offers else (0.5, 0.2, 0.15, 0.15))[0]
    while num_exchanges > is_thinking:
        if offers:
            messages += _exchange_with_tools(rng, offers)
            num_exchanges -= 1
        else:
            turns = rng.choices(_TURNS, _SHARES)[0](rng)
            messages += _as_messages(turns)
            num_exchanges -= len(turns)
    tools = [offer.tool for offer in offers]
    if not is_thinking:
        return Chat(messages, tools)
    more, thought = _think_with_tools(rng, offers) if offers else _think(rng)
    return Chat(messages + more, tools, thought)


def _as_messages(turns: list[Turn]) -> list[Message]:
    return [
        message
        for question, answer in turns
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]


def _exchange_with_tools(rng: Random, offers: list[Offer]) -> list[Message]:
    if rng.random() < CALLS_SHARE:
        return exchange_calls(rng, draw_calls(rng, offers))
    return _as_messages(_answer_without_call(rng, offers))


def _answer_without_call(rng: Random, offers: list[Offer]) -> list[Turn]:
    """What no offered tool is for: it is answered at once, or declined if only another tool could do it."""
    kinds = [offer.kind for offer in offers]
    pick = rng.random()
    if pick < 0.3:
        missing = [kind for kind in (LOOKUP, *OTHERS) if kind not in kinds]
        return [(rng.choice(missing).draw(rng).question, ONLY_KNOW)]
    if pick < 0.6:
        return [draw_small_talk(rng)]
    if pick < 0.7 and CALCULATOR not in kinds:
        return [draw_sum_turn(rng)]
    return rng.choice((read_sentences, _draw_json, _draw_json, _tell_on_request, _draw_echo))(rng)


def _think(rng: Random) -> tuple[list[Message], str]:
    """An exchange, and the thought before its answer."""
    pick = rng.random()
    if pick < 0.7:
        drawn = draw_sum(rng, is_minus=rng.random() < 0.25)
        question, reply = rng.choice(TAKE_FORMS if drawn.is_minus else ADD_FORMS)
        return _as_messages([(drawn.fill(question), drawn.fill(reply))]), think_about_sum(drawn)
    if pick < 0.9:
        question, sentence, answer = read_sentence(rng)
        return _as_messages([(question, answer)]), think_about_text(sentence)
    turns = rng.choice((_tell_on_request, _draw_json, _draw_small_talk, _draw_unknown, _draw_echo))(rng)
    return _as_messages(turns[:1]), ANSWER_AT_ONCE


def _think_with_tools(rng: Random, offers: list[Offer]) -> tuple[list[Message], str]:
    """An exchange up to the turn that calls, or to the answer, and the thought before it."""
    if rng.random() > CALLS_SHARE:
        return _as_messages(_answer_without_call(rng, offers)[:1]), ANSWER_AT_ONCE
    calls = draw_calls(rng, offers)
    messages = exchange_calls(rng, calls)
    if rng.random() < 0.5:
        return messages[:2], think_about_calls([offer.name for offer, _ in calls])
    return messages, think_about_results([asked.result for _, asked in calls])


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
    task = draw_copying_task(rng) if rng.random() < 0.4 else draw_json_task(rng)
    return [(task.prompt, task.answer)]


def _draw_small_talk(rng: Random) -> list[Turn]:
    return [draw_small_talk(rng)]


def _draw_unknown(rng: Random) -> list[Turn]:
    return [draw_unknown(rng)]


def _draw_echo(rng: Random) -> list[Turn]:
    return [draw_echo(rng)]


_TURNS: tuple[Callable[[Random], list[Turn]], ...] = (
    _tell_on_request,
    read_story,
    read_sentences,
    _draw_word_problem,
    _draw_sums,
    _draw_json,
    _draw_small_talk,
    _draw_unknown,
    _draw_echo,
)
_SHARES = (0.1, 0.07, 0.11, 0.02, 0.28, 0.28, 0.04, 0.06, 0.04)
