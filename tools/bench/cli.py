"""`quire bench`: each kind is a module with Options and `run`, loaded when it is asked for."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from importlib import import_module

from ...frontend.cli.parser import ExitCode, UsageError, name_commands_if_asked
from ...ipc.errors import QuireError, did_you_mean
from ..options import parse_options
from ..sigterm import unwinding_at_sigterm

_KINDS = {
    "offline": "generated tokens/s of Quire, vLLM and transformers, side by side",
    "kernels": "each operation of a model as a fraction of what the device allows, beside torch",
    "rows": "what each thing that a request may ask of its tokens costs a row",
    "roofline": "what a step of any model costs on a card: bytes, operations, launches, floor",
    "startup": "import, --help, cold start to the first token and where it goes, idle CPU, memory",
    "core": "what the engine core's scheduling costs a step, with a fake worker",
    "embed": "texts to vectors by Quire, vLLM and sentence-transformers, side by side",
    "http": "chunks/s and CPU a chunk of one HTTP process, with a fake engine",
    "serve": "load on an OpenAI-compatible server: throughput, TTFT, ITL and E2E percentiles, goodput",
}


def run(argv: Sequence[str]) -> int:
    """Run `quire bench`."""
    name_commands_if_asked(argv, _KINDS)
    kind = argv[0] if argv else "--help"
    if kind in ("-h", "--help"):
        lines = "".join(f"  {name:<11} {text}\n" for name, text in _KINDS.items())
        print(f"usage: quire bench KIND [OPTIONS]\n\nkinds:\n{lines}")
        print("`quire bench KIND --help` has the options.")
        return ExitCode.OK if argv else ExitCode.USAGE
    if kind not in _KINDS:
        raise UsageError(f"bench={kind!r}: expected one of {', '.join(_KINDS)}{did_you_mean(kind, _KINDS)}")
    module = import_module(f".{kind}", __package__)
    options = parse_options(module.Options, f"quire bench {kind}", argv[1:], getattr(module, "EPILOG", ""))
    try:
        with unwinding_at_sigterm():
            return module.run(options)
    except subprocess.CalledProcessError as error:
        # What it had to say is on stderr already.
        raise QuireError(f"{' '.join(error.cmd[1:3])} ended with code {error.returncode}") from None
