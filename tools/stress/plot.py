"""The picture of a stress run over time: output, kills, gaps, memory. Loads matplotlib."""

from __future__ import annotations

from itertools import pairwise

from .run import StressResult

_NUM_BINS = 120
_COLORS = {"core": "tab:red", "worker": "tab:orange", "http": "tab:purple", "client": "tab:gray"}


def plot_timeline(result: StressResult, title: str, path: str) -> None:
    """Write the picture."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, (rates, gaps, memory) = pyplot.subplots(3, 1, figsize=(12, 9), sharex=True)
    figure.suptitle(title, fontsize=10)
    start = result.started_at

    bin_s = max(result.duration_s, 1e-3) / _NUM_BINS
    rates.set_ylabel("pieces of output/s")
    for kind in dict.fromkeys(record.client for record in result.records):
        counts = [0] * _NUM_BINS
        for at in (at for one in result.records if one.client == kind for at in one.piece_times):
            counts[min(max(int((at - start) / bin_s), 0), _NUM_BINS - 1)] += 1
        rates.step([bin_s * place for place in range(_NUM_BINS)], [n / bin_s for n in counts], label=kind)
    rates.legend(loc="upper right", fontsize=8)

    gaps.set_ylabel("longest gap in an answer, s")
    longest = [
        max(((b - a, b) for a, b in pairwise(one.piece_times)), default=None) for one in result.records
    ]
    found = [gap for gap in longest if gap is not None]
    gaps.scatter([at - start for _, at in found], [gap for gap, _ in found], s=6)

    memory.set_ylabel("RSS, MB")
    memory.set_xlabel("s")
    for role in dict.fromkeys(sample.role for sample in result.samples):
        samples = [sample for sample in result.samples if sample.role == role]
        memory.plot(
            [one.at - start for one in samples],
            [one.rss_bytes / 1e6 for one in samples],
            ".",
            ms=3,
            label=role,
        )
    if result.samples:
        memory.legend(loc="upper right", fontsize=8)

    for axes in (rates, gaps, memory):
        for strike in result.strikes:
            axes.axvline(strike.at - start, color=_COLORS[strike.kill.role], lw=0.8, alpha=0.7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
