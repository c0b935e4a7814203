"""`quire bench embed`: texts to vectors by Quire and its peers, side by side in one run.

Every contestant is a process of its own and gets all texts in one call. A round asks all of them in turn; the
table shows medians. Loads no torch itself. For servers there is `quire bench serve --endpoint embeddings`.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ...ipc.spec.model_spec import Dtype
from ..options import COUNT, option
from .bench_model import ensure_written, load_spec
from .ceilings import MEMORY_READ_BYTES, measure_rates
from .contest import ContestError, Job, open_contestants, run_rounds
from .floors import compute_prompts_work, make_card
from .machine import print_machine
from .model_configs import ENCODERS
from .peers import NONE, QUIRE, SENTENCE_TRANSFORMERS, VLLM, check_peers, choose_peers, make_embed_launch
from .table import format_megabytes, format_rate, format_table
from .workloads import count_tokens, make_texts

_NUM_TEXTS = 256
_SHORTEST, _LONGEST = 16, 256  # tokens of a text
_PEERS = (VLLM, SENTENCE_TRANSFORMERS)
_DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Options:
    """256 texts of 16 to 256 tokens in one call, on random encoders."""

    model: tuple[str, ...] = option(
        tuple(ENCODERS), f"of {', '.join(ENCODERS)} (all)", choices=tuple(ENCODERS), metavar="M"
    )
    dtype: tuple[Dtype, ...] = option(_DTYPES, f"of {', '.join(_DTYPES)}", choices=_DTYPES, metavar="T")
    rounds: int = option(5, "measured rounds (5)", COUNT, metavar="N")
    peer: tuple[str, ...] = option(
        (), f"{NONE}, or of {', '.join(_PEERS)} ({NONE})", choices=(NONE, *_PEERS), metavar="PEER"
    )


def run(options: Options) -> int:
    """Measure and print; returns 0. Raises ContestError, and InputError for an unusable peer."""
    peers = choose_peers(options.peer, _PEERS)
    print_machine(check_peers(peers))
    header = ["", *(f"{name}, texts/s" for name in (QUIRE, *peers))]
    header += [*(f"quire/{peer}" for peer in peers), "of the floor", "ready, s", "RSS MB"]
    rows = [
        _measure(model, dtype, peers, options.rounds) for model in options.model for dtype in options.dtype
    ]
    print(format_table(header, rows))
    return 0


def _measure(model: str, dtype: Dtype, peers: list[str], num_rounds: int) -> list[str]:
    """The row of a model in a number format."""
    folder, vocab_size = ensure_written(model), ENCODERS[model]["vocab_size"]
    launches = {name: make_embed_launch(name, folder, dtype) for name in (QUIRE, *peers)}

    def make_job(number: int) -> Job:
        return Job(texts=make_texts(vocab_size, _NUM_TEXTS, _SHORTEST, _LONGEST, f"round {number}"))

    with open_contestants(launches) as contestants:
        measured = run_rounds(contestants, num_rounds, f"{model} {dtype}", make_job)
        ready_s, size = contestants[0].ready_s, sum(contestants[0].rss_bytes.values())
    for measurement in measured.values():
        if measurement.error is not None:
            raise ContestError(measurement.error)
    # The floor: the operations of the texts over the machine's matrix rate.
    work = compute_prompts_work(load_spec(str(folder)), dtype, list(map(count_tokens, make_job(0).texts)))
    rates = measure_rates("cpu", dtype, min(work.weight_bytes, MEMORY_READ_BYTES))
    ours = measured[QUIRE]
    pairs = {peer: zip(ours.results, measured[peer].results, strict=False) for peer in peers}
    ratios = [statistics.median(their.seconds / our.seconds for our, their in pairs[peer]) for peer in peers]
    return [
        f"{model}, {dtype}",
        *(format_rate(_NUM_TEXTS / measurement.seconds) for measurement in measured.values()),
        *(f"{ratio:.2f}" for ratio in ratios),
        f"{work.find_floor_s(make_card(rates)) / ours.seconds:.0%}",
        f"{ready_s:.2f}",
        format_megabytes(size),
    ]
