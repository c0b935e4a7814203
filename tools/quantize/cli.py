"""`quire quantize`: parses what is to be made and shows how far it is; torch is loaded behind it only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...frontend.cli.parser import ExitCode, Parser
from ...ipc.errors import InputError
from ..sigterm import unwinding_at_sigterm

_FORMATS = ("gptq-int4", "int8")
_GROUP_SIZES = (32, 64, 128)
_EPILOG = """\
OUT is a folder in compressed-tensors' format (pack-quantized, as llm-compressor writes it), which Quire, vLLM
and transformers load. Embeddings, norms, routers and the projection to logits stay as they are. MODEL is a
decoder: an encoder is refused, and `quire serve --quantization int8` narrows it while it is read.

gptq-int4 takes texts of the kind that the model is for: --calibration FILE; without it they are the pocket
model's stories, sums and chats, which suit few other models. What quantizing has cost is measured after: by
the pocket model's evaluation where the model is one, else by the likelihood of texts that nothing was
calibrated with.

examples:
  quire quantize pocket ./pocket-int4
  quire quantize ./my-model ./my-model-int4 --calibration texts.txt --samples 256
  quire quantize Qwen/Qwen3-0.6B ./qwen-int8 --format int8
"""


def run(argv: Sequence[str]) -> int:
    """Run `quire quantize`."""
    parser = Parser(
        "quire quantize", "Make a checkpoint of 4 or 8 bits of a plain one.", _EPILOG, " MODEL OUT"
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, a hub name, or pocket")
    add("out", metavar="OUT", type=Path, help="the folder to make; it may not be there yet")
    add("--format", choices=_FORMATS, default=_FORMATS[0], help="gptq-int4 (the default) or int8")
    text = "inputs that share a scale; default: of gptq-int4 the largest that fits, of int8 all of an output"
    add("--group-size", type=int, choices=_GROUP_SIZES, metavar="N", help=text)
    text = "gptq-int4: round inputs in the order of their magnitude (on); it costs nothing when served"
    add("--act-order", action=Parser.Switch, default=True, help=text)
    add(
        "--calibration", type=Path, metavar="FILE", help="a text file, of which gptq-int4 takes the beginning"
    )
    add("--samples", type=int, default=128, metavar="N", help="sequences to calibrate with (128)")
    add("--sample-length", type=int, default=512, metavar="N", help="tokens of a sequence (512)")
    add("--measure", action=Parser.Switch, default=True, help="measure the loss when it is done (on)")
    options = parser.parse(argv)
    for name, least in (("samples", 1), ("sample_length", 2)):  # of one token there is nothing to predict
        if getattr(options, name) < least:
            raise InputError(name, getattr(options, name), f"an integer of at least {least}")
    from . import loss, quantize

    job = quantize.QuantizeOptions(
        options.model,
        _follow_links(options.out),
        options.format,
        options.group_size,
        options.act_order,
        options.calibration,
        options.samples,
        options.sample_length,
    )
    quantize.check_out(job.out)
    config, started = quantize.load_plain(job), time.monotonic()
    progress = _progress(f"quantizing {options.model}", config.model.spec.num_layers)
    with unwinding_at_sigterm(), progress as report:
        held_out = quantize.quantize_folder(job, config, report)
    before, after = (_count_bytes(folder) for folder in (Path(config.model.model), job.out))
    took_s = time.monotonic() - started
    print(f"{options.out}: {after / 1e6:,.1f} MB of {before / 1e6:,.1f} MB, in {took_s:.1f} s", flush=True)
    if not options.measure:
        return ExitCode.OK
    plain = Path(config.model.model)
    if loss.is_pocket(plain):
        for line in loss.compare_pockets(plain, job.out):
            print(line, flush=True)
    else:
        print(loss.compare_likelihoods(plain, job.out, held_out), flush=True)
    return ExitCode.OK


def _follow_links(out: Path) -> Path:
    """The place that is meant, which another folder can take."""
    try:
        return out.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise InputError("OUT", str(out), "a folder that can be made") from error


@contextmanager
def _progress(what: str, total: int) -> Generator[Callable[[int], None]]:
    """A bar on a terminal, with the time that is left; a line a layer where nobody watches."""
    if not sys.stderr.isatty():
        yield lambda done: print(f"quire: {what}: layer {done} of {total}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def _count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
