"""Attacks by grammars: dear ones, bad ones, and many rows that follow one. Each is drawn anew, so that no
cache helps. What is answered is counted as `wire` says.
"""

from __future__ import annotations

import random
import string
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from .attack import attack
from .bodies import ALLOWED
from .plan import Target
from .wire import Exchange, converse, make_request

_PATH = "/v1/completions"
_COUNT = 4  # of each kind, at once
Draw = Callable[[Target, random.Random], Iterator[dict[str, Any]]]


def _draw_word(rng: random.Random) -> str:
    """One that has not been there."""
    return "".join(rng.choices(string.ascii_lowercase, k=12))


def _draw_words(target: Target, rng: random.Random, count: int) -> list[str]:
    """So many, fewer in a run of a smaller scale."""
    return [_draw_word(rng) for _ in range(target.shrink(count))]


def _make_ambiguous(start: str, names: list[str]) -> dict[str, Any]:
    """A grammar of which a mask takes as the third power of its alternatives: of 250 50 s, if it may."""
    rules = [f"start: {start}", "z: " + "|".join(f"{name} z?" for name in names)]
    return {"grammar": "\n".join([*rules, *(f"{name}: /[a-z ]/" for name in names)])}


def _draw_dear(target: Target, rng: random.Random) -> Iterator[dict[str, Any]]:
    """About the largest that are let in, and about the slowest to compile."""
    words = _draw_words(target, rng, 400)
    properties = {word: {"type": "string", "pattern": f"^{word}|[a-z]*$"} for word in words}
    yield {"json": {"type": "object", "properties": properties}}
    yield {"json": {"enum": _draw_words(target, rng, 10_000)}}
    yield {"choice": _draw_words(target, rng, 10_000)}
    yield {"regex": f"({_draw_word(rng)}|[a-z]{{1,{rng.randint(500, 2000)}}}x)*"}
    yield {"regex": "|".join(_draw_words(target, rng, 5000))}
    words = _draw_words(target, rng, 3000)
    rules = [f'r{place}: "{word}" | r{place + 1}' for place, word in enumerate(words)]
    yield {"grammar": "\n".join(["start: r0", *rules, f'r{len(words)}: "a"'])}


def _draw_bad(target: Target, rng: random.Random) -> Iterator[dict[str, Any]]:
    """What is huge, deep, recursive or broken: a compiler's worst cases, of which most are refused."""
    depth, word = target.shrink(100_000), _draw_word(rng)
    yield {"json": '{"items":' * depth + f'{{"const":"{word}"}}' + "}" * depth}
    yield {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": word}]}}}}
    yield {"json": {"type": "string", "pattern": f"({word}|(a?){{1000}}){{1000}}"}}
    yield {"regex": f"{word}((((a*)*)*)*b){{1,100000}}"}
    yield {"regex": f"{word}" + "(" * depth}
    yield {"grammar": f'start: start start | "{word}" | '}
    yield {"grammar": f'start: a\na: b\nb: "{word}" {"(" * depth}'}
    yield {"grammar": "".join(rng.choices(string.printable, k=target.shrink(200_000)))}
    yield {"structural_tag": {"triggers": [word] * target.shrink(10_000), "structures": []}}


def _draw_heavy(target: Target, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Many rows whose next tokens take long to find, to their end."""
    words = _draw_words(target, rng, 500)
    yield {"regex": f"([a-z ,.]*({'|'.join(words)})?)*"}
    yield {"json": {"type": "array", "items": {"enum": [*words, *map(str, range(100))]}, "minItems": 100}}


def _draw_exploding(target: Target, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Grammars that compile in a moment and of which one mask takes for ever: the first, or a later one."""
    for count in (60, 250, 800):
        yield _make_ambiguous("z+", _draw_words(target, rng, count))
        yield _make_ambiguous("/[0-9]{3}#/ z+", _draw_words(target, rng, count))


def _draw_ambiguous(_target: Target, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Many rows with a small grammar each of whose masks takes as long as it may."""
    yield _make_ambiguous("z+", [_draw_word(rng) for _ in range(12)])


def _draw_failing(target: Target, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Small requests of which all that are in a step fail in it."""
    for _ in range(target.shrink(19)):
        yield _make_ambiguous("/[0-9]{2}#/ z+", _draw_words(target, rng, 250))


# By attack: fields of StructuredOutputsParams, one of each kind; and those of the request, of the target.
GRAMMARS: dict[str, tuple[Draw, Callable[[Target], dict[str, Any]]]] = {
    "dear-grammars": (_draw_dear, lambda _: {}),
    "bad-grammars": (_draw_bad, lambda _: {}),
    "heavy-masks": (_draw_heavy, lambda _: {"prompt": ["Go on"] * 4, "n": 32, "max_tokens": 300}),
    "exploding-masks": (_draw_exploding, lambda _: {"max_tokens": 16}),
    "ambiguous-rows": (
        _draw_ambiguous,
        lambda target: {"prompt": ["Go on"] * 4, "n": target.shrink(32), "max_tokens": 64},
    ),
    "failing-rows": (_draw_failing, lambda _: {"max_tokens": 16}),
}


def _play(name: str, target: Target, rng: random.Random, until: float) -> Counter[str]:
    """Requests of which each has a grammar of its own."""
    draw, make_fields = GRAMMARS[name]
    common = {"model": target.model, "prompt": "Hi", "max_tokens": 8} | make_fields(target)
    bodies = [common | {"structured_outputs": one} for _ in range(_COUNT) for one in draw(target, rng)]
    requests = [make_request(target, _PATH, msgspec.json.encode(body)) for body in bodies]
    return converse(target, [Exchange([request]) for request in requests], until)


for _name in GRAMMARS:
    attack(_name, ALLOWED)(partial(_play, _name))
