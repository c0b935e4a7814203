"""`quire run-batch`: the requests of a file through the engine, a result line for each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ....ipc.errors import InputError
from ...async_llm import AsyncLLM
from ..batch.batch_files import Progress, ResultFile, open_input, read_lines, read_progress
from ..engine_choice import add_engine_options, read_engine_choice
from ..parser import ExitCode, Parser, UsageError
from ..streams import PhaseLine

if TYPE_CHECKING:  # it loads Starlette, which --help and a finished batch do without
    from tqdm import tqdm

    from ..batch.batch_files import BatchResult
    from ..batch.batch_run import BatchCounts

_EPILOG = """\
Input: a JSON object a line, as OpenAI's batches have them: {"custom_id", "method": "POST", "url", "body"}
with url one of /v1/chat/completions, /v1/completions, /v1/responses; of a model with vectors /v1/embeddings,
/classify, /pooling, /v1/score, /v1/rerank and the other names of these two.
Output: a line for every line of the input that is not empty, in the order in which they finish:
{"id", "custom_id", "response", "error"}. "id" holds the line's number, "response" what the server would
answer, errors too; "error" is set instead for a line that is no request.

Run again after an interruption, the same command goes on: lines that have a result are not run again.
Exit code: 0 when every line of this run was answered, 1 when one was refused or failed, or the engine ended,
130 when interrupted.
"""


def run(argv: Sequence[str]) -> int:
    """Run `quire run-batch`."""
    options = _make_parser().parse(argv)
    input_path = _choose_path("input", options.input, options.input_file)
    output_path = _choose_path("output", options.output, options.output_file)
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise InputError("max_concurrency", options.max_concurrency, "an integer of at least 1")
    engine_args = read_engine_choice(options)
    with open_input(input_path) as readable:
        progress = read_progress(readable)
        if os.path.exists(output_path) and os.path.samefile(readable, output_path):
            raise InputError("output", output_path, "another file than the input")
        with contextlib.closing(ResultFile.open(output_path, options.overwrite)) as results:
            results.resume(progress)
            if progress.num_done == progress.num_lines:
                print(f"{progress.num_lines:,} lines, every one has a result in {output_path}")
                return ExitCode.OK
            llm = AsyncLLM(engine_args, attach=options.attach, client_kind="run-batch")
            return _run_due_lines(llm, readable, progress, results, options.max_concurrency)


def _run_due_lines(
    llm: AsyncLLM, input_path: str, progress: Progress, results: ResultFile, max_concurrency: int | None
) -> int:
    import uvloop

    from ..batch.batch_run import BatchRun

    started_at = time.perf_counter()
    num_before = progress.num_done
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _Bar(progress) as bar:
        batch = BatchRun(llm, read_lines(input_path), progress, results, max_concurrency, bar.take)
        is_whole = runner.run(batch.run(bar.show_phase))
    print(describe_run(progress, batch.counts, num_before, time.perf_counter() - started_at))
    if not is_whole:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if batch.counts.num_answered == batch.counts.num_results else ExitCode.FAILED


def describe_run(progress: Progress, counts: BatchCounts, num_before: int, seconds: float) -> str:
    """One line: what this run did, and what is left to do."""
    text = (
        f"{counts.num_results:,} results in {seconds:.1f} s: {counts.num_answered:,} answered, "
        f"{counts.num_refused:,} refused, {counts.num_failed:,} failed"
    )
    if num_before:
        text += f"; {num_before:,} were there before"
    num_left = progress.num_lines - progress.num_done
    return f"{text}; {num_left:,} are left, the same command goes on with them" if num_left else text


class _Bar:
    """Progress on the terminal; nothing where nobody watches."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._start = ExitStack()
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> _Bar:
        self._phases = self._start.enter_context(PhaseLine("run-batch"))
        return self

    def __exit__(self, *_: object) -> None:
        self._start.close()
        if self._bar is not None:
            self._bar.close()

    def show_phase(self, phase: str) -> None:
        """Say what the engine's start is at."""
        self._phases.show(phase)

    def take(self, _result: BatchResult) -> None:
        """Count a result; the first one replaces the line of the start's phases by the bar."""
        if self._bar is None:
            from tqdm import tqdm

            self._start.close()
            self._bar = tqdm(
                total=self._progress.num_lines,
                initial=self._progress.num_done - 1,
                unit=" lines",
                mininterval=0.2,
                disable=not sys.stderr.isatty(),
            )
        self._bar.update()


def _choose_path(field: str, positional: str | None, option: str | None) -> str:
    if positional is not None and option is not None:
        raise InputError(field, option, f"once, not beside {positional!r}")
    path = option if positional is None else positional
    if path is None:
        raise UsageError(f"{field}: a file, as in 'quire run-batch in.jsonl out.jsonl'")
    return path


def _make_parser() -> Parser:
    parser = Parser(
        "quire run-batch", "Run a file of OpenAI requests and keep a result for each.", _EPILOG, " [IN OUT]"
    )
    add = parser.add_argument
    add("input", nargs="?", metavar="IN", help="the requests, JSON lines; - reads standard input")
    add("output", nargs="?", metavar="OUT", help="the results, JSON lines")
    add("-i", "--input-file", metavar="IN", help="as IN")
    add("-o", "--output-file", metavar="OUT", help="as OUT")
    add("--overwrite", action="store_true", help="forget the results in OUT instead of going on with them")
    text = "most lines at a time (twice the engine's max_num_seqs)"
    add("--max-concurrency", type=int, metavar="N", help=text)
    add_engine_options(parser)
    parser.set_defaults(log_level="WARNING")
    return parser
