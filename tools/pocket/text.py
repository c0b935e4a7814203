"""The corpus: raw stories, bare sums and conversations, drawn document by document from one `Random`.

A conversation is a list of messages; the chat template is applied by who trains. Nothing here tokenizes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

from ..words import GIRLS, join_and, pick_animal
from .calls import CALCULATOR, LOOKUP, OTHERS, Message, Offer, draw_calls, draw_offers, exchange_calls
from .json_tasks import draw_copying_task, draw_json_task
from .phrases import draw_value, read_phrases
from .reading import Turn, read_sentence, read_sentences, read_story
from .stories import tell_story
from .sums import Sum, draw_sum, draw_sum_line, draw_sum_turn
from .talk import ONLY_KNOW, SYSTEM_PROMPTS, draw_echo, draw_small_talk, draw_unknown


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that ends with the assistant. thought: what it thinks before its last message."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    thought: str | None = None


Document: TypeAlias = str | Chat
Draw: TypeAlias = Callable[[Random], list[Turn]]

TOOLS_SHARE, THINKING_SHARE = 0.36, 0.2  # of the conversations
CALLS_SHARE = 0.75  # of the exchanges where tools are offered
_REQUESTS = read_phrases("requests")
_ANSWER_AT_ONCE = "I can answer this at once."


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
            yield _draw_conversation(rng)


def _draw_conversation(rng: Random) -> Chat:
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
            turns = rng.choices(tuple(_TURNS), tuple(_TURNS.values()))[0](rng)
            messages += _as_messages(turns)
            num_exchanges -= len(turns)
    tools = [offer.tool for offer in offers]
    if not is_thinking:
        return Chat(messages, tools)
    more, thought = _think_with_tools(rng, offers) if offers else _think(rng)
    return Chat(messages + more, tools, thought)


def _as_messages(turns: list[Turn]) -> list[Message]:
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
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
    return rng.choice((read_sentences, _draw_json, _draw_json, _tell_on_request, _ECHO))(rng)


def _think(rng: Random) -> tuple[list[Message], str]:
    """An exchange, and the thought before its answer."""
    pick = rng.random()
    if pick < 0.7:
        drawn = draw_sum(rng, is_minus=rng.random() < 0.25)
        return _as_messages([drawn.ask(rng)]), think_about_sum(drawn)
    if pick < 0.9:
        question, sentence, answer = read_sentence(rng)
        return _as_messages([(question, answer)]), f"The text says: {sentence}"
    turns = rng.choice((_tell_on_request, _draw_json, _SMALL_TALK, _UNKNOWN, _ECHO))(rng)
    return _as_messages(turns[:1]), _ANSWER_AT_ONCE


def _think_with_tools(rng: Random, offers: list[Offer]) -> tuple[list[Message], str]:
    """An exchange up to the turn that calls, or to the answer, and the thought before it."""
    if rng.random() > CALLS_SHARE:
        return _as_messages(_answer_without_call(rng, offers)[:1]), _ANSWER_AT_ONCE
    calls = draw_calls(rng, offers)
    messages = exchange_calls(rng, calls)
    if rng.random() < 0.5:
        return messages[:2], f"I call {join_and(list(dict.fromkeys(offer.name for offer, _ in calls)))}."
    return messages, f"The result is {join_and([asked.result for _, asked in calls])}."


def think_about_sum(asked: Sum) -> str:
    """Ones, then tens, then both: "7 and 8 make 15. 1 and 4 and 3 make 8. So 85."."""
    (tens_a, ones_a), (tens_b, ones_b) = divmod(asked.a, 10), divmod(asked.b, 10)
    if asked.is_minus:
        borrowed = int(ones_a < ones_b)
        ones = f"{ones_a + 10 * borrowed} without {ones_b} leaves {ones_a + 10 * borrowed - ones_b}."
        left = tens_a - borrowed - tens_b
        tens = f"{tens_a}{' without 1' * borrowed} without {tens_b} leaves {left}."
    else:
        carried = (ones_a + ones_b) // 10
        ones = f"{ones_a} and {ones_b} make {ones_a + ones_b}."
        tens = f"{'1 and ' * carried}{tens_a} and {tens_b} make {carried + tens_a + tens_b}."
    return f"{ones} {tens} So {asked.result}."


def _tell_on_request(rng: Random) -> list[Turn]:
    """A story that the user asks for, and often a question about it afterwards.

    Animals are heroes more often than elsewhere, because users ask for them.
    """
    if rng.random() < 0.25:
        story, request = tell_story(rng), rng.choice(_REQUESTS["any_story_requests"])
    else:
        is_animal = rng.random() < 0.5
        hero = pick_animal(rng, rng.random() < 0.5, named=rng.random() < 0.6) if is_animal else None
        story = tell_story(rng, hero, says_kind=True)
        request = rng.choice(_REQUESTS["story_requests"]).format(s=story.subject)
    turns = [(request, story.text)]
    if rng.random() < 0.4:
        turns.append(rng.choice(story.questions))
    return turns


def _draw_word_problem(rng: Random) -> list[Turn]:
    """A sum told in words, with small numbers."""
    drawn = draw_sum(rng, is_minus=rng.random() < 0.3)
    while max(drawn.a, drawn.b) > 20 or min(drawn.a, drawn.b) < 2:
        drawn = draw_sum(rng, drawn.is_minus)
    name, foods = (str(draw_value(rng, kind)) for kind in ("names", "foods"))
    he = "she" if name in GIRLS else "he"
    change = draw_value(rng, _REQUESTS["takes" if drawn.is_minus else "gains"])
    amount, sign = (f"{drawn.b}", "minus") if drawn.is_minus else (f"{drawn.b} more", "plus")
    asked = f"{he.capitalize()} {change} {amount}. How many {foods} does {he} have now?"
    answer = f"{drawn.a} {sign} {drawn.b} is {drawn.result}, so {name} has {drawn.result} {foods}."
    return [(f"{name} has {drawn.a} {foods}. {asked}", answer)]


def _draw_sums(rng: Random) -> list[Turn]:
    return [draw_sum_turn(rng) for _ in range(rng.randint(1, 4))]


def _draw_json(rng: Random) -> list[Turn]:
    task = draw_copying_task(rng) if rng.random() < 0.4 else draw_json_task(rng)
    return [(task.prompt, task.answer)]


def _as_turns(draw: Callable[[Random], Turn]) -> Draw:
    return lambda rng: [draw(rng)]


_SMALL_TALK, _UNKNOWN, _ECHO = map(_as_turns, (draw_small_talk, draw_unknown, draw_echo))
_TURNS: dict[Draw, float] = {  # and how often each is drawn
    _tell_on_request: 0.1,
    read_story: 0.07,
    read_sentences: 0.11,
    _draw_word_problem: 0.02,
    _draw_sums: 0.28,
    _draw_json: 0.28,
    _SMALL_TALK: 0.04,
    _UNKNOWN: 0.06,
    _ECHO: 0.04,
}
