"""`quire embed`: texts to vectors, as a table for people, a vector a line for pipes, or JSON lines."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from ....ipc.params.param_fields import ParamField
from ....ipc.params.pooling_params import POOLING_FIELDS, PoolingParams
from ...models.model_files import POCKET_ENCODER
from ...requests.vectors.outputs import EmbeddingRequestOutput, to_embedding
from ..engine_choice import add_engine_options, read_engine_choice
from ..parser import ExitCode, Parser, split_at_dashes
from ..streams import read_lines

_EPILOG = """\
Without a TEXT, each line that is piped in is one. A TEXT that begins with a dash goes after '--'.
On a terminal a line shows how near a vector is to the first one (1.00: the same) and how it begins; elsewhere
a line is a vector, a JSON list. --json prints one object a line: index, text, embedding, prompt_tokens.
"""
_NUMBERS_SHOWN = 4
_FLAGS = ("dimensions", "truncate_prompt_tokens")


def run(argv: Sequence[str]) -> int:
    """Run `quire embed`."""
    argv, literal_texts = split_at_dashes(argv)
    options = _make_parser().parse(argv)
    params = _read_params(options)
    texts = [*options.text, *literal_texts] or read_lines("text", "a TEXT, or lines piped in")
    engine_args = read_engine_choice(options, POCKET_ENCODER)
    from ...vector_calls import PoolingCalls
    from ..session import start_engine

    with start_engine(engine_args, options.attach) as engine:
        pooled = PoolingCalls(engine, itertools.count()).encode(
            texts, params, "embed", prompt_name=options.prompt_name, prompt=options.prompt, use_tqdm=False
        )
    outputs = [to_embedding(output.check()) for output in pooled]
    if options.json:
        lines = [_make_json(index, *both) for index, both in enumerate(zip(texts, outputs, strict=True))]
    elif sys.stdout.isatty():
        lines = _make_table(texts, outputs)
    else:
        lines = [msgspec.json.encode(shorten(output)).decode() for output in outputs]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return ExitCode.OK


def shorten(output: EmbeddingRequestOutput) -> list[float]:
    """The numbers with as many digits as tell float32 numbers apart."""
    return [float(f"{number:.9g}") for number in output.outputs.embedding]


def _make_json(index: int, text: str, output: EmbeddingRequestOutput) -> str:
    line = {"index": index, "text": text, "embedding": shorten(output)}
    return msgspec.json.encode(line | {"prompt_tokens": len(output.prompt_token_ids)}).decode()


def _make_table(texts: Sequence[str], outputs: Sequence[EmbeddingRequestOutput]) -> list[str]:
    from ...requests.vectors.scoring import compute_cosine

    first = memoryview(outputs[0].outputs.raw).cast("f")
    lines: list[str] = []
    for text, output in zip(texts, outputs, strict=True):
        start = " ".join(f"{number:7.4f}" for number in output.outputs.embedding[:_NUMBERS_SHOWN])
        near = compute_cosine(first, memoryview(output.outputs.raw).cast("f"))
        lines.append(f"{near:5.2f}  [{start} ... {output.outputs.hidden_size} numbers]  {text}")
    return lines


def _read_params(options: argparse.Namespace) -> PoolingParams:
    """The parameters that the user gave, checked. Raises PoolingParamsError."""
    return PoolingParams(task="embed", **{name: getattr(options, f"pooling_{name}") for name in _FLAGS})


def _make_parser() -> Parser:
    parser = Parser("quire embed", "Turn texts into vectors.", _EPILOG, " [TEXT ...]")
    parser.add_argument("text", nargs="*", metavar="TEXT", help="a text to embed")
    group: Any = parser.add_argument_group("embedding options")
    group.add_argument("--json", action="store_true", help="one JSON object a line")
    for field in map(POOLING_FIELDS.__getitem__, _FLAGS):
        _add_number(group, field)
    text = "which of the model's prompts goes before each text, such as query or document"
    group.add_argument("--prompt-name", metavar="NAME", help=text)
    group.add_argument("--prompt", metavar="TEXT", help="what goes before each text")
    add_engine_options(parser)
    parser.set_defaults(log_level="WARNING", model=POCKET_ENCODER)
    return parser


def _add_number(group: Any, field: ParamField) -> None:
    flag, text = f"--{field.name.replace('_', '-')}", field.meta.description
    group.add_argument(flag, dest=f"pooling_{field.name}", type=field.kind, metavar="N", help=text)
