"""`quire generate`: continues prompts and prints prompt and continuation as one text, or as JSON lines."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from ....ipc.errors import PromptError
from ...outputs import RequestOutput
from ..engine_choice import add_engine_options, read_engine_choice
from ..parser import ExitCode, Parser, split_at_dashes
from ..sampling_options import add_sampling_options, make_sampling_params, read_sampling_options
from ..streams import read_piped, show_controls

# Another story each time, and still a sensible one; llama.cpp and ollama have 0.8 and top_p 0.9 to 0.95.
DEFAULTS: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 256}

_EPILOG = """\
Several prompts run together; their texts come in the order of the prompts, an empty line between them.
Without a PROMPT, what is piped in is one prompt. A prompt that begins with a dash goes after '--'.
--json prints one object a line: index, prompt, text, finish_reason, stop_reason, prompt_tokens,
completion_tokens, cached_tokens.
"""


def run(argv: Sequence[str]) -> int:
    """Run `quire generate`."""
    argv, literal_prompts = split_at_dashes(argv)
    options = _make_parser().parse(argv)
    sampling = read_sampling_options(options)
    prompts = _collect_prompts([*options.prompt, *options.quick, *literal_prompts])
    engine_args = read_engine_choice(options)
    is_streaming = sys.stdout.isatty() if options.stream is None else options.stream
    printer = JsonPrinter(prompts) if options.json else TextPrinter(prompts, options.echo, is_streaming)
    from ..session import Session

    with Session(engine_args, options.attach) as session:
        params = make_sampling_params(sampling, session.default_sampling, DEFAULTS)
        for index, output in session.stream(prompts, params):
            printer.take(index, output)
    return ExitCode.OK


class Printer(ABC):
    """Prints results in the order of the prompts while they arrive in any order."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._collected: list[RequestOutput | None] = [None] * len(prompts)
        self._current = 0  # the first prompt that has not been printed whole

    def take(self, index: int, output: RequestOutput) -> None:
        """Take what is new of one prompt's output, and print what can be printed by now."""
        collected = self._collected[index]
        if collected is None:
            self._collected[index] = output
        else:
            collected.add_delta(output)
        while self._current < len(self._collected):
            front = self._collected[self._current]
            if front is None:
                return
            self._print(self._current, front)
            if not front.finished:
                return
            self._current += 1

    @abstractmethod
    def _print(self, index: int, output: RequestOutput) -> None:
        """Print what of `output` (all so far) can be printed and was not yet."""


class TextPrinter(Printer):
    """The prompt and its continuation; piece by piece if `is_streaming`."""

    def __init__(self, prompts: Sequence[str], has_echo: bool, is_streaming: bool) -> None:
        super().__init__(prompts)
        self._has_echo = has_echo
        self._is_streaming = is_streaming
        self._num_printed: int | None = None  # characters of the current text; None: nothing of it yet

    def _print(self, index: int, output: RequestOutput) -> None:
        if not (self._is_streaming or output.finished):
            return
        text = output.outputs[0].text if output.outputs else ""
        if self._num_printed is None:
            separator = "\n" if index else ""
            sys.stdout.write(separator + (self._prompts[index] if self._has_echo else ""))
            self._num_printed = 0
        sys.stdout.write(show_controls(text[self._num_printed :], sys.stdout))
        self._num_printed = len(text)
        if output.finished:
            sys.stdout.write("\n")
            self._num_printed = None
        sys.stdout.flush()


class JsonPrinter(Printer):
    """One JSON object a line, each when its prompt and all before it have finished."""

    def _print(self, index: int, output: RequestOutput) -> None:
        if not output.finished:
            return
        completion = output.outputs[0]
        line = {
            "index": index,
            "prompt": self._prompts[index],
            "text": completion.text,  # the continuation alone
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
            "cached_tokens": output.num_cached_tokens or 0,
        }
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()


def _collect_prompts(prompts: list[str]) -> list[str]:
    """The prompts from the command line, or the one that is piped in. Raises PromptError."""
    if not prompts:
        if sys.stdin is None or sys.stdin.isatty():  # pyright: ignore[reportUnnecessaryComparison]
            raise PromptError("prompt", "", "a PROMPT, or a text piped in")
        prompts = [read_piped("prompt").removesuffix("\n")]
    for prompt in prompts:
        if not prompt:
            raise PromptError("prompt", prompt, "a text that is not empty")
    return prompts


def _make_parser() -> Parser:
    parser = Parser("quire generate", "Continue one or more prompts.", _EPILOG, " [PROMPT ...]")
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="a text to continue")
    text = "as PROMPT; vLLM's name for it"
    parser.add_argument("-q", "--quick", action="append", default=[], metavar="PROMPT", help=text)
    output: Any = parser.add_argument_group("output options")
    output.add_argument("--json", action="store_true", help="one JSON object a line instead of text")
    output.add_argument("--stream", action=Parser.Switch, help="print as it comes; default: on a terminal")
    output.add_argument("--echo", action=Parser.Switch, default=True, help="print the prompt before its text")
    sampling: Any = parser.add_argument_group(
        "sampling options", "Defaults: the model's own, else temperature 0.7, top_p 0.95; at most 256 tokens."
    )
    add_engine_options(parser)
    parser.set_defaults(log_level="WARNING")  # a text is not to be preceded by a table
    add_sampling_options(sampling)  # after the engine's, whose --seed it takes over
    return parser
