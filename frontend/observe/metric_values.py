"""What LLM.get_metrics returns: Prometheus' series as plain values, in vLLM's classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads prometheus_client
    from prometheus_client.core import Metric as Family
    from prometheus_client.samples import Sample

_Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Metric:
    """A series. One name may have several, told apart by `labels`."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """Only grows: a count of things, or a sum of seconds."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Counts by place. No series of Quire is one; vLLM's scripts ask for the class."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """Observations; `buckets` has how many were at most its key, which is '+Inf' for all."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(families: Iterable[Family]) -> list[Metric]:
    """Each series, in the families' order. A counter's name has no '_total', as with vLLM."""
    return [metric for family in families for metric in _read_family(family)]


def _read_family(family: Family) -> Iterable[Metric]:
    if family.type == "histogram":
        return _read_histograms(family)
    kind = Gauge if family.type == "gauge" else Counter
    return [kind(family.name, sample.labels, _plain(sample.value)) for sample in family.samples]


def _read_histograms(family: Family) -> Iterable[Histogram]:
    parts: dict[_Labels, dict[str, dict[str, float]]] = {}
    for sample in family.samples:
        labels, bound = _split_bound(sample)
        part = sample.name.removeprefix(f"{family.name}_")  # bucket, count or sum
        parts.setdefault(labels, {}).setdefault(part, {})[bound] = sample.value
    return [_make_histogram(family.name, labels, part) for labels, part in parts.items()]


def _make_histogram(name: str, labels: _Labels, parts: Mapping[str, Mapping[str, float]]) -> Histogram:
    buckets = {bound: int(value) for bound, value in parts["bucket"].items()}
    return Histogram(name, dict(labels), int(parts["count"][""]), parts["sum"][""], buckets)


def _split_bound(sample: Sample) -> tuple[_Labels, str]:
    others = frozenset((name, value) for name, value in sample.labels.items() if name != "le")
    return others, sample.labels.get("le", "")


def _plain(value: float) -> float:
    """The value, as an integer if it is whole."""
    return int(value) if value == int(value) else float(value)
