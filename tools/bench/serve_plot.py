"""The picture of a `quire bench serve` run: rates and latency over time, and how latencies are spread.

Needs matplotlib, which is loaded here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ...ipc.errors import InputError, describe_install
from .load import LoadResult
from .serve_metrics import measure

_NUM_BINS = 60  # over a run
_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Raises InputError where the plot could not be written after the run."""
    if find_spec("matplotlib") is None:
        raise InputError("plot", path, f"needs matplotlib, of the extra 'bench': {describe_install('bench')}")
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise InputError("plot", path, f"a file name that ends in one of {', '.join(_SUFFIXES)}")


def plot_run(result: LoadResult, title: str, path: str) -> None:
    """Write the picture."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    answered = [record for record in result.records if record.error is None]
    figure, ((rates, over_time), (first, gaps)) = pyplot.subplots(2, 2, figsize=(12, 8))
    figure.suptitle(title, fontsize=10)

    bin_s = max(result.duration_s, 1e-3) / _NUM_BINS
    starts_s = [index * bin_s for index in range(_NUM_BINS)]
    text_times = [at for record in answered for at in record.text_times]
    rates.set_title("throughput")
    rates.plot(starts_s, _count_per_s(text_times, result, bin_s), label="pieces of text/s")
    rates.set_ylabel("pieces of text/s")
    ends = [record.ended_at for record in answered]
    requests = rates.twinx()
    requests.plot(starts_s, _count_per_s(ends, result, bin_s), color="tab:orange", label="answers/s")
    requests.set_ylabel("answers/s")
    rates.set_xlabel("s")
    figure.legend(loc="upper right", fontsize=8)

    over_time.set_title("latency by when a request was due")
    for name, label in (("ttft", "TTFT"), ("e2el", "E2EL")):
        points = [(r.due_at - result.started_at, v * 1e3) for r in answered for v in measure(r, name)]
        over_time.scatter([x for x, _ in points], [y for _, y in points], s=6, label=label)
    over_time.set_xlabel("s")
    over_time.set_ylabel("ms")
    if answered:
        over_time.set_yscale("log")
        over_time.legend(fontsize=8)

    for axes, name, heading in ((first, "ttft", "TTFT"), (gaps, "itl", "ITL")):
        values_ms = sorted(value * 1e3 for record in answered for value in measure(record, name))
        axes.set_title(f"{heading}: share of the values at or below")
        axes.plot(values_ms, [(index + 1) / len(values_ms) for index in range(len(values_ms))])
        axes.set_xlabel("ms")
        axes.set_ylim(0, 1.02)
        axes.grid(True, alpha=0.3)

    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _count_per_s(times: Sequence[float], result: LoadResult, bin_s: float) -> list[float]:
    """How many of `times` fall into each bin of the run, a second."""
    counts = [0] * _NUM_BINS
    for at in times:
        counts[min(int((at - result.started_at) / bin_s), _NUM_BINS - 1)] += 1
    return [count / bin_s for count in counts]
