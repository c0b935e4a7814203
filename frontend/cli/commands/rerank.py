"""`quire rerank`: documents in the order of how well they answer a query."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ....ipc.errors import InputError, PromptError
from ...models.model_files import POCKET_ENCODER
from ..engine_choice import add_engine_options, read_engine_choice
from ..parser import ExitCode, Parser, split_at_dashes
from ..streams import read_lines, split_lines

_EPILOG = """\
Without a DOCUMENT or --documents, each line that is piped in is one. What begins with a dash goes after '--'.
A line is a score and the document, the best first; in pipes a tab is between them. The score is the model's
own if it judges pairs, else the cosine of two embeddings. What is too long is cut. --json prints one object a
line: index, score, document.
"""


def run(argv: Sequence[str]) -> int:
    """Run `quire rerank`."""
    argv, literal_texts = split_at_dashes(argv)
    options = _make_parser().parse(argv)
    texts = [] if options.query is None else [options.query, *options.document]
    query, *documents = [*texts, *literal_texts] or [""]
    if not query:
        raise PromptError("query", query, "a QUERY that is not empty")
    if options.top_n is not None and options.top_n < 1:
        raise InputError("top_n", options.top_n, "an integer from 1")
    for name in options.documents or ():
        documents += _read_file(name)
    documents = documents or read_lines("document", "DOCUMENTs, --documents, or lines piped in")
    engine_args = read_engine_choice(options, POCKET_ENCODER)
    from ...vector_calls import PoolingCalls
    from ..session import start_engine

    with start_engine(engine_args, options.attach) as engine:
        outputs = PoolingCalls(engine, itertools.count()).score(
            query, documents, None, truncate_prompt_tokens=-1, instruction=options.instruction, use_tqdm=False
        )
    scores = [output.check().outputs.score for output in outputs]
    ranked = sorted(enumerate(scores), key=lambda entry: -entry[1])[: options.top_n]
    for index, score in ranked:
        sys.stdout.write(_make_line(index, score, documents[index], options.json))
    return ExitCode.OK


def _make_line(index: int, score: float, document: str, is_json: bool) -> str:
    if is_json:
        line = {"index": index, "score": score, "document": document}  # its place among those given
        return msgspec.json.encode(line).decode() + "\n"
    return f"{score:.4f}{'  ' if sys.stdout.isatty() else chr(9)}{document}\n"


def _read_file(name: str) -> list[str]:
    try:
        return split_lines(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PromptError("--documents", name, f"a file of texts, one a line ({error})") from None


def _make_parser() -> Parser:
    parser = Parser("quire rerank", "Order documents by a query.", _EPILOG, " QUERY [DOCUMENT ...]")
    parser.add_argument("query", nargs="?", metavar="QUERY", help="what is looked for")
    parser.add_argument("document", nargs="*", metavar="DOCUMENT", help="a text to put in its place")
    group: Any = parser.add_argument_group("ranking options")
    text = "a file of documents, one a line (repeatable)"
    group.add_argument("--documents", metavar="FILE", action="append", help=text)
    group.add_argument("--top-n", metavar="N", type=int, help="print only the best N; default: all")
    text = "what a model that takes instructions is to judge by"
    group.add_argument("--instruction", metavar="TEXT", help=text)
    group.add_argument("--json", action="store_true", help="one JSON object a line")
    add_engine_options(parser)
    parser.set_defaults(log_level="WARNING", model=POCKET_ENCODER)
    return parser
