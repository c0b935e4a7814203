"""`python grammar_fuzz.py FOLDER SEED COUNT`: mutated schemas, regular expressions and grammars, in turn.

Each is taken or refused, in bounded time. What else happens ends the process: another exception, a signal, or
MAX_CASE_S of processor time, with the case on standard error before it.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.frontend.formats.schemas.compiler import GrammarCompiler
from quire.frontend.text.tokenizer import load_tokenizer
from quire.ipc.errors import SamplingParamsError
from quire.ipc.params.structured_outputs import StructuredOutputsParams

sys.path.insert(0, str(Path(__file__).parent))
from schemas import all_schemas

MAX_CASE_S = 30.0
_MEMORY_BYTES = 3 << 30
_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2.5, 1e308, -1e-308, 2**31, 2**63, 10**30),
    *("", "a", "\0", "#", "#/", "#/$defs/x", "(", "(a|b)*" * 20, "^" * 9, "a{1,99999}"),
    *([], {}, [[]], [{}], {"": {}}, {"type": "string"}, {"$ref": "#"}, ["string", "null"]),
    *("object", "array", "string", "integer", "number", "null", "date-time"),
]
_REGEXES = [
    r"[a-z]+@[a-z]+\.com",
    r"(\d{3}-){2}\d{4}",
    r"(a|b|c)*d?",
    r"^\p{L}{1,20}$",
    r"(?i)abc(?-i)d|\x41[^\W_]",
]
_GRAMMARS = [
    'start: "a" rest*\nrest: /[0-9]+/ | "(" start ")"\n',
    'start: item ("," item)*\nitem[lazy]: /[a-z]+/\n%ignore /[ \\t]+/\n',
    'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}}\n',
    'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"\n',
    'start: A & ~B\nA: /[a-z]{1,9}/\nB: "no" | "yes"\n%import common.INT\n',
    'start: text[capture, max_tokens=9]\ntext[stop="x"]: /(.|\\n)*/\n',
]
_PIECES = [
    *'()[]{}*+?|/"\\\n:&~^$.@',
    *("%json", "{1,5000}", "<|x|>", "<[1-9]>", "start", "//", "::=", "(?=", "\\b", "\\1", "é", "\U0001f600"),
]


def mutate_text(chance: random.Random, text: str) -> str:
    for _ in range(chance.choice([1, 1, 2, 4])):
        place, length = chance.randrange(len(text) + 1), chance.randrange(6)
        piece = chance.choice([*_PIECES, text[place : place + 20], text]) * chance.choice([1] * 9 + [50])
        text = (text[:place] + piece + text[place + length :])[:100_000]
    return text


def mutate_value(chance: random.Random, value: Any) -> Any:
    """A copy in which something, somewhere, is another value, twice there, missing or under another name."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        changed = dict(value)
        name = chance.choice(list(changed))
        match chance.randrange(6):
            case 0:
                del changed[name]
            case 1:
                changed[chance.choice(_KEYWORDS)] = changed.pop(name)
            case 2:
                changed[chance.choice(_KEYWORDS)] = chance.choice([*_VALUES, value])
            case _:
                changed[name] = mutate_value(chance, changed[name])
        return changed
    if isinstance(value, list) and value and chance.random() < 0.7:
        place = chance.randrange(len(value))
        return [*value[:place], mutate_value(chance, value[place]), *value[place:]]
    if isinstance(value, str) and chance.random() < 0.5:
        return mutate_text(chance, value)
    return chance.choice(_VALUES)


_SCHEMAS = [case.schema for case in all_schemas()]
_KEYWORDS = sorted({name for schema in _SCHEMAS for name in schema})


def make_schema(chance: random.Random) -> dict[str, Any]:
    schema = chance.choice(_SCHEMAS)
    for _ in range(chance.choice([1, 1, 2, 5])):
        schema = mutate_value(chance, schema)
    if chance.random() < 0.2:
        schema = {"anyOf": [schema, chance.choice(_SCHEMAS)], "$defs": {"x": chance.choice(_SCHEMAS)}}
    return {"json": schema if chance.random() < 0.7 else mutate_text(chance, json.dumps(schema))}


_MAKERS: list[Callable[[random.Random], dict[str, Any]]] = [
    make_schema,
    make_schema,
    lambda chance: {"regex": mutate_text(chance, chance.choice(_REGEXES))},
    lambda chance: {"grammar": mutate_text(chance, chance.choice(_GRAMMARS))},
]


def main(folder: str, seed: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    compiler = GrammarCompiler(load_tokenizer(folder))
    num_taken = 0
    for number in range(seed, seed + count):
        chance = random.Random(number)
        fields = chance.choice(_MAKERS)(chance)
        print(f"{number}: {fields}"[:2000].encode(errors="replace"), file=sys.stderr, flush=True)
        signal.setitimer(signal.ITIMER_PROF, MAX_CASE_S)
        try:
            compiler.compile(StructuredOutputsParams(**fields))
            num_taken += 1
        except SamplingParamsError:
            pass
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    print(num_taken)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
