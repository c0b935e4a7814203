"""Attacks by grammars: dear ones, bad ones, and many rows that follow one. Each is drawn anew, so that no
cache helps. What is answered is counted as `wire` says.
"""

from __future__ import annotations

import string
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from .attack import Attack
from .bodies import RequestAttack
from .wire import Exchange, converse, make_request

_PATH = "/v1/completions"
_COUNT = 4  # of each kind, at once


class GrammarAttack(Attack):
    """Requests of which each has a grammar of its own."""

    allowed = RequestAttack.allowed
    fields: dict[str, Any] = {"max_tokens": 8}  # noqa: RUF012 - never written

    def play(self, until: float) -> Counter[str]:
        common = {"model": self.target.model, "prompt": "Hi"} | self.fields
        bodies = [common | {"structured_outputs": one} for _ in range(_COUNT) for one in self.draw()]
        requests = [make_request(self.target, _PATH, msgspec.json.encode(body)) for body in bodies]
        return converse(self.target, [Exchange([request]) for request in requests], until)

    @abstractmethod
    def draw(self) -> Iterator[dict[str, Any]]:
        """Fields of StructuredOutputsParams, one of each kind."""

    def draw_word(self) -> str:
        """One that has not been there."""
        return "".join(self.rng.choices(string.ascii_lowercase, k=12))

    def draw_words(self, count: int) -> list[str]:
        """So many, fewer in a run of a smaller scale."""
        return [self.draw_word() for _ in range(self.target.shrink(count))]


class DearGrammars(GrammarAttack):
    """About the largest that are let in, and about the slowest to compile."""

    def draw(self) -> Iterator[dict[str, Any]]:
        properties = {
            word: {"type": "string", "pattern": f"^{word}|[a-z]*$"} for word in self.draw_words(400)
        }
        yield {"json": {"type": "object", "properties": properties}}
        yield {"json": {"enum": self.draw_words(10_000)}}
        yield {"choice": self.draw_words(10_000)}
        yield {"regex": f"({self.draw_word()}|[a-z]{{1,{self.rng.randint(500, 2000)}}}x)*"}
        yield {"regex": "|".join(self.draw_words(5000))}
        words = self.draw_words(3000)
        rules = [f'r{place}: "{word}" | r{place + 1}' for place, word in enumerate(words)]
        yield {"grammar": "\n".join(["start: r0", *rules, f'r{len(words)}: "a"'])}


class BadGrammars(GrammarAttack):
    """What is huge, deep, recursive or broken: a compiler's worst cases, of which most are refused."""

    def draw(self) -> Iterator[dict[str, Any]]:
        depth, word = self.target.shrink(100_000), self.draw_word()
        yield {"json": '{"items":' * depth + f'{{"const":"{word}"}}' + "}" * depth}
        yield {
            "json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": word}]}}}
        }
        yield {"json": {"type": "string", "pattern": f"({word}|(a?){{1000}}){{1000}}"}}
        yield {"regex": f"{word}((((a*)*)*)*b){{1,100000}}"}
        yield {"regex": f"{word}" + "(" * depth}
        yield {"grammar": f'start: start start | "{word}" | '}
        yield {"grammar": f'start: a\na: b\nb: "{word}" {"(" * depth}'}
        yield {"grammar": "".join(self.rng.choices(string.printable, k=self.target.shrink(200_000)))}
        yield {"structural_tag": {"triggers": [word] * self.target.shrink(10_000), "structures": []}}


class HeavyMasks(GrammarAttack):
    """Many rows whose next tokens take long to find, to their end."""

    fields = {"prompt": ["Go on"] * 4, "n": 32, "max_tokens": 300}  # noqa: RUF012 - never written

    def draw(self) -> Iterator[dict[str, Any]]:
        words = self.draw_words(500)
        yield {"regex": f"([a-z ,.]*({'|'.join(words)})?)*"}
        yield {"json": {"type": "array", "items": {"enum": [*words, *map(str, range(100))]}, "minItems": 100}}


def _make_ambiguous(start: str, names: list[str]) -> str:
    """A grammar of which a mask takes as the third power of its alternatives: of 250 50 s, if it may."""
    rules = [f"start: {start}", "z: " + "|".join(f"{name} z?" for name in names)]
    return "\n".join([*rules, *(f"{name}: /[a-z ]/" for name in names)])


class ExplodingMasks(GrammarAttack):
    """Grammars that compile in a moment and of which one mask takes for ever: the first, or a later one."""

    fields = {"max_tokens": 16}  # noqa: RUF012 - never written

    def draw(self) -> Iterator[dict[str, Any]]:
        for count in (60, 250, 800):
            yield {"grammar": _make_ambiguous("z+", self.draw_words(count))}
            yield {"grammar": _make_ambiguous("/[0-9]{3}#/ z+", self.draw_words(count))}


class AmbiguousRows(GrammarAttack):
    """Many rows with a small grammar each of whose masks takes as long as it may."""

    def play(self, until: float) -> Counter[str]:
        self.fields = {"prompt": ["Go on"] * 4, "n": self.target.shrink(32), "max_tokens": 64}
        return super().play(until)

    def draw(self) -> Iterator[dict[str, Any]]:
        yield {"grammar": _make_ambiguous("z+", [self.draw_word() for _ in range(12)])}


class FailingRows(GrammarAttack):
    """Small requests of which all that are in a step fail in it."""

    fields = {"max_tokens": 16}  # noqa: RUF012 - never written

    def draw(self) -> Iterator[dict[str, Any]]:
        for _ in range(self.target.shrink(19)):
            yield {"grammar": _make_ambiguous("/[0-9]{2}#/ z+", self.draw_words(250))}
