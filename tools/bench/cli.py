"""`quire bench`: parses what is to be measured and hands over to the one that does it, loaded only then."""

from __future__ import annotations

import json
import math
import subprocess
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...frontend.cli.parser import ExitCode, Parser, UsageError, name_commands_if_asked
from ...ipc.errors import InputError, QuireError, did_you_mean
from ..sigterm import unwinding_at_sigterm

_HELP = """\
usage: quire bench KIND [OPTIONS]

kinds:
  offline     generated tokens/s of Quire, vLLM, llama.cpp and transformers, side by side
  kernels     each operation of a model as a fraction of what the device allows, beside torch
  roofline    what a step of any model costs on a card: bytes, operations, launches, floor; measures nothing
  startup     import, --help, cold start to the first token and where it goes, idle CPU, memory
  core        what the engine core's scheduling costs a step, with a fake worker
  attach      what attaching to a daemon takes, and what HTTP adds to its engine
  embed       texts to vectors by Quire, vLLM and sentence-transformers, side by side
  http        chunks/s and CPU a chunk of one HTTP process, with a fake engine
  performance runs the benches of docs/performance.md and writes their tables into it
  serve       load on an OpenAI-compatible server: throughput, TTFT, ITL and E2E percentiles, goodput

`quire bench KIND --help` has the options.
"""


def run(argv: Sequence[str]) -> int:
    """Run `quire bench`."""
    name_commands_if_asked(argv, _KINDS)
    kind = argv[0] if argv else "--help"
    if kind in ("-h", "--help"):
        print(_HELP, end="")
        return ExitCode.OK if argv else ExitCode.USAGE
    runner = _KINDS.get(kind)
    if runner is None:
        raise UsageError(f"bench={kind!r}: one of {', '.join(_KINDS)}{did_you_mean(kind, _KINDS)}")
    try:
        with unwinding_at_sigterm():
            return runner(argv[1:])
    except subprocess.CalledProcessError as error:
        # What it had to say is on stderr already.
        raise QuireError(f"{' '.join(error.cmd[1:3])} ended with code {error.returncode}") from None


def _run_offline(argv: Sequence[str]) -> int:
    from . import offline
    from .peers import PEERS
    from .workloads import WORKLOADS

    parser = Parser(
        "quire bench offline",
        "Quire and its peers on the same workloads in one run, each in a process of its own.",
        "workloads (W1 to W4; W1 and W5 for qwen3-0.6b and llama-8b):\n"
        + "".join(f"  {name}  {kind.summary}\n" for name, kind in WORKLOADS.items()),
    )
    add = parser.add_argument
    add(
        "--model",
        default="tiny",
        help="tiny, small, small-q4_0 (random weights, made on first use), qwen3-0.6b, llama-8b (no "
        "weights), pocket, a folder, or a GGUF file",
    )
    add("--workload", nargs="+", choices=tuple(WORKLOADS), metavar="W")
    _add_peer_options(
        parser,
        ("none", "transformers", *PEERS),
        f"none, transformers (all three modes, the default), or of {', '.join(PEERS)}; may be repeated",
    )
    add(
        "--roofline",
        action="store_true",
        help="each workload as a fraction of its floor, and the floor's parts",
    )
    add("--rounds", type=int, default=3, metavar="N", help="measured rounds (3)")
    add("--json", metavar="FILE", help="write every figure to a file too")
    text = "an EngineArgs field for Quire"
    add("--engine-arg", action="append", default=[], metavar="NAME=VALUE", help=text)
    options = parser.parse(argv)
    _check_counts(options, "rounds")
    return offline.run_offline(
        offline.OfflineOptions(
            model=options.model,
            workloads=tuple(options.workload or ()),
            peers=_expand_peers(options.peer or ["transformers"], PEERS),
            peer_python=options.peer_python,
            rounds=options.rounds,
            is_roofline=options.roofline,
            json_path=options.json,
            engine_args=dict(_parse_engine_arg(text) for text in options.engine_arg),
        )
    )


def _run_kernels(argv: Sequence[str]) -> int:
    from .kernel_rows import OPS
    from .kernels import run_kernels

    parser = Parser(
        "quire bench kernels", "Measured ceilings first, then each operation and shape as a fraction of them."
    )
    add = parser.add_argument
    add("--op", nargs="+", choices=OPS, metavar="OP", help=f"of {', '.join(OPS)} (all)")
    add("--seconds", type=float, default=0.5, metavar="S", help="for a row (0.5)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    add("--json", metavar="FILE", help="write every figure to a file too")
    options = parser.parse(argv)
    if not 0 < options.seconds < math.inf:
        raise InputError("seconds", options.seconds, "a number above 0")
    return run_kernels(tuple(options.op or OPS), options.seconds, options.device, options.json)


def _run_roofline(argv: Sequence[str]) -> int:
    from ...ipc.spec.model_spec import DTYPE_SIZE_BYTES
    from .cost_model import CARDS
    from .roofline import RooflineOptions, run_roofline

    parser = Parser(
        "quire bench roofline", "What a step costs on a card by its data sheet; no GPU is needed."
    )
    add = parser.add_argument
    cards, dtypes = tuple(CARDS), tuple(DTYPE_SIZE_BYTES)
    add(
        "--card",
        nargs="+",
        choices=cards,
        default=["h200"],
        metavar="C",
        help=f"of {', '.join(cards)} (h200)",
    )
    add(
        "--model",
        default="qwen3-0.6b",
        help="tiny, small, qwen3-0.6b, llama-8b, a folder, or a GGUF file (%(default)s)",
    )
    text = "requests that decode (1 8 32 256)"
    add("--batch", nargs="+", type=int, default=[1, 8, 32, 256], metavar="N", help=text)
    add("--context", nargs="+", type=int, default=[208], metavar="N", help="tokens of each (208)")
    text = "tokens of a prompt in the same step (0)"
    add("--prompt-tokens", nargs="+", type=int, default=[0], metavar="N", help=text)
    add("--dtype", choices=dtypes, default="bfloat16", help="of what is not narrow (bfloat16)")
    text = "int4, int8 or fp8, where config.json names no format"
    add("--quantization", choices=("int4", "int8", "fp8"), help=text)
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="cards that share the model (1)")
    add("--json", metavar="FILE", help="write every figure to a file too")
    options = parser.parse(argv)
    for name, least in (("batch", 0), ("context", 1), ("prompt_tokens", 0)):
        for value in getattr(options, name):
            if value < least:
                raise InputError(name, value, f"an integer of at least {least}")
    return run_roofline(
        RooflineOptions(
            options.model,
            tuple(options.card),
            tuple(options.batch),
            tuple(options.context),
            tuple(options.prompt_tokens),
            options.dtype,
            options.quantization,
            options.tensor_parallel_size,
            options.json,
        )
    )


def _run_startup(argv: Sequence[str]) -> int:
    from .startup import run_startup

    parser = Parser("quire bench startup", "What starting costs, measured in fresh processes.")
    add = parser.add_argument
    add("--model", default="pocket", help="of the cold start: pocket, tiny, small, or a folder")
    _add_peer_options(parser, ("none", "vllm"), "none or vllm, started once (none)")
    add("--rounds", type=int, default=5, metavar="N", help="cold starts (5)")
    add("--idle", type=float, default=10.0, metavar="S", help="seconds of idling to watch (10)")
    add("--json", metavar="FILE", help="write every figure to a file too")
    options = parser.parse(argv)
    _check_counts(options, "rounds")
    peer_python = options.peer_python if "vllm" in (options.peer or ()) else None
    return run_startup(options.model, options.rounds, options.idle, options.json, peer_python)


def _run_core(argv: Sequence[str]) -> int:
    from .core import run_core

    parser = Parser(
        "quire bench core", "schedule() and update() of 256 running requests, with a fake worker."
    )
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="decode steps to measure (500)")
    options = parser.parse(argv)
    _check_counts(options, "steps")
    return run_core(options.steps)


def _run_attach(argv: Sequence[str]) -> int:
    from .attach import run_attach

    parser = Parser("quire bench attach", "What attaching to a daemon takes, and what HTTP adds.")
    parser.add_argument("--model", default="pocket", help="the daemon's (pocket)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="of everything (10)")
    options = parser.parse(argv)
    _check_counts(options, "rounds")
    return run_attach(options.rounds, options.model)


def _run_embed(argv: Sequence[str]) -> int:
    from .embed import EmbedOptions, run_embed
    from .embed_http import run_embed_http
    from .encoder_models import ENCODERS
    from .peers import (
        EMBED_PEERS,
        EMBED_SERVERS,
        INFINITY,
        SENTENCE_TRANSFORMERS,
        VLLM,
        default_peer_python,
    )

    text = "256 texts of 16 to 256 tokens in one call, or a text a request, on random encoders."
    parser = Parser("quire bench embed", text)
    add = parser.add_argument
    names, dtypes = tuple(ENCODERS), ("bfloat16", "float32")
    add("--model", nargs="+", choices=names, default=names, metavar="M", help=f"of {', '.join(names)} (all)")
    add("--dtype", nargs="+", choices=dtypes, default=dtypes, metavar="T", help=f"of {', '.join(dtypes)}")
    add("--rounds", type=int, default=5, metavar="N", help="measured rounds (5)")
    known = tuple(dict.fromkeys(("none", *EMBED_PEERS, *EMBED_SERVERS)))
    _add_peer_options(parser, known, f"none, or of {', '.join(known[1:])} (none)")
    text = "beside servers, 64 connections: of none, " + ", ".join(EMBED_SERVERS)
    add("--http", action="store_true", help=text)
    for peer in (SENTENCE_TRANSFORMERS, INFINITY):
        default, text = default_peer_python(peer), "the Python of its environment (%(default)s)"
        add(f"--{peer}-python", type=Path, default=default, metavar="FILE", help=text)
    options = parser.parse(argv)
    _check_counts(options, "rounds")
    run, able = (run_embed_http, EMBED_SERVERS) if options.http else (run_embed, EMBED_PEERS)
    peers = tuple(peer for peer in known if peer in (options.peer or ()) and peer != "none")
    for peer in peers:
        if peer not in able:
            way = "with" if options.http else "without"
            raise InputError("peer", peer, f"none, or of {', '.join(able)} {way} --http")
    pythons = {
        VLLM: options.peer_python,
        SENTENCE_TRANSFORMERS: options.sentence_transformers_python,
        INFINITY: options.infinity_python,
    }
    return run(EmbedOptions(tuple(options.model), tuple(options.dtype), peers, pythons, options.rounds))


def _run_http(argv: Sequence[str]) -> int:
    from .http import NUM_STREAMS, run_http

    parser = Parser("quire bench http", "Streaming by one HTTP server process, with a fake engine.")
    parser.add_argument(
        "--streams",
        type=int,
        default=NUM_STREAMS,
        metavar="N",
        help=f"streams at the same time ({NUM_STREAMS})",
    )
    parser.add_argument("--chunks", type=int, default=2000, metavar="N", help="chunks of a stream (2000)")
    options = parser.parse(argv)
    _check_counts(options, "streams", "chunks")
    return run_http(options.streams, options.chunks)


def _run_performance(argv: Sequence[str]) -> int:
    from .performance import PAGE, PARTS, run_performance

    parser = Parser(
        "quire bench performance", "Measures what docs/performance.md shows, and writes it there."
    )
    add = parser.add_argument
    add(
        "--part",
        nargs="+",
        choices=tuple(PARTS),
        default=list(PARTS),
        metavar="P",
        help=f"of {', '.join(PARTS)}",
    )
    add("--page", type=Path, default=PAGE, metavar="FILE", help="the page to write to (docs/performance.md)")
    add("--quick", action="store_true", help="one round of the least work: to see that all is in place")
    add("--without-peers", action="store_true", help="Quire alone, also where a peer is not installed")
    options = parser.parse(argv)
    return run_performance(options.part, options.page, options.quick, not options.without_peers)


def _run_serve(argv: Sequence[str]) -> int:
    from .prompts import LengthRange
    from .serve import ServeOptions, run_serve
    from .serve_metrics import parse_goodput

    options = _make_serve_parser().parse(argv)
    _check_counts(options, "num_prompts")
    if options.num_warmups < 0:
        raise InputError("num_warmups", options.num_warmups, "an integer of at least 0")
    if options.max_concurrency is not None:
        _check_counts(options, "max_concurrency")
    if not options.request_rate > 0:
        raise InputError("request_rate", options.request_rate, "a number above 0, or inf")
    if not 0 <= options.temperature < math.inf:
        raise InputError("temperature", options.temperature, "a number of at least 0")
    if not 0 < options.timeout_s < math.inf:
        raise InputError("timeout", options.timeout_s, "seconds above 0")
    options.input_len = LengthRange.parse("input_len", options.input_len)
    options.output_len = LengthRange.parse("output_len", options.output_len)
    options.goodput_s = parse_goodput(options.goodput_s)
    return run_serve(ServeOptions(**vars(options)))


def _make_serve_parser() -> Parser:
    parser = Parser(
        "quire bench serve",
        "Load on an OpenAI-compatible server, and what its users would see.",
        'Lines of --dataset FILE: {"prompt": TEXT} or {"messages": [...]}, and "max_tokens" for its own.\n'
        "Exit code: 0 when every request was answered, 1 otherwise.",
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server (%(default)s)")
    add("--model", metavar="ID", help="default: the first that the server lists")
    add(
        "--endpoint",
        choices=("chat", "completions", "embeddings"),
        default="chat",
        help="which API (%(default)s)",
    )
    add("--api-key", metavar="KEY", help="sent as the bearer token")
    add("--dataset", default="random", metavar="D", help="random words, or a file of JSON lines")
    text = "words in a random prompt, or a range (%(default)s)"
    add("--input-len", default="32-128", metavar="N", help=text)
    add("--output-len", default="64", metavar="N", help="most tokens of an answer, or a range (%(default)s)")
    add("--ignore-eos", action="store_true", help="ask for answers of the full length (not every server can)")
    add("--temperature", type=float, default=0.0, metavar="T", help="of the answers (%(default)s)")
    add("--num-prompts", type=int, default=100, metavar="N", help="requests to measure (%(default)s)")
    add("--num-warmups", type=int, default=2, metavar="N", help="requests before, not measured (%(default)s)")
    add("--request-rate", type=float, default=math.inf, metavar="R", help="open loop: requests/s, or inf")
    add("--max-concurrency", type=int, metavar="C", help="most requests at a time; closed loop if rate inf")
    text = "for one whole answer (%(default)s)"
    add("--timeout", type=float, default=600.0, metavar="S", dest="timeout_s", help=text)
    add("--seed", type=int, default=0, metavar="N", help="of prompts, lengths and times (%(default)s)")
    text = "limits of ttft, tpot, itl, e2e"
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", dest="goodput_s", help=text)
    add("--json", metavar="FILE", dest="json_path", help="write every figure to a file too")
    add(
        "--plot",
        metavar="FILE",
        dest="plot_path",
        help="write a picture too (.png, .svg, .pdf); needs the extra 'bench'",
    )
    return parser


def _add_peer_options(parser: Parser, choices: tuple[str, ...], text: str) -> None:
    from .peers import default_peer_python

    parser.add_argument("--peer", nargs="+", action="extend", choices=choices, metavar="PEER", help=text)
    parser.add_argument(
        "--peer-python",
        type=Path,
        default=default_peer_python(),
        metavar="FILE",
        help="the Python of vLLM's environment (%(default)s)",
    )


def _expand_peers(chosen: Sequence[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """The peers in `known`'s order; 'transformers' is short for all of its modes."""
    return tuple(peer for peer in known if peer in chosen or peer.split("-")[0] in chosen)


def _parse_engine_arg(text: str) -> tuple[str, Any]:
    """'max_num_seqs=8' -> ('max_num_seqs', 8); a value that is no JSON is a text."""
    name, separator, value = text.partition("=")
    if not separator:
        raise InputError("engine_arg", text, "NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _check_counts(options: Namespace, *fields: str) -> None:
    for field in fields:
        if getattr(options, field) < 1:
            raise InputError(field, getattr(options, field), "an integer of at least 1")


_KINDS: dict[str, Callable[[Sequence[str]], int]] = {
    "offline": _run_offline,
    "kernels": _run_kernels,
    "roofline": _run_roofline,
    "startup": _run_startup,
    "core": _run_core,
    "attach": _run_attach,
    "embed": _run_embed,
    "http": _run_http,
    "performance": _run_performance,
    "serve": _run_serve,
}
