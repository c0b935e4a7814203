"""docs/metrics.md: every series of /metrics, from a core that has run nothing and counts that are made up.

And of docs/features.md the architectures that families read, as config.json and GGUF files name them.
"""

from __future__ import annotations

import re

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ...core.engine.engine_core import EngineCore
from ...frontend.http.jobs.store import NUM_NUMBERS
from ...frontend.http.observe.http_counts import BOUNDS_S, STATUSES, RouteCounts
from ...frontend.http.observe.metrics import format_http_counts, format_metrics, format_response_counts
from ...frontend.models.families import ARCHITECTURES
from ...frontend.models.families.encoders import ENCODERS
from ...frontend.models.families.wrapped import WRAPPED_ARCHITECTURES
from ...frontend.models.gguf.architectures import GGUF_NAMES
from ...frontend.options.engine_args import EngineArgs
from ..markdown import format_table

_COMMON_LABELS = ("model_name", "engine", "le")


def render_engine_metrics() -> str:
    """The engine's series."""
    core = EngineCore(EngineArgs(load_format="dummy").create_engine_config(), num_blocks=8)
    return _render(format_metrics({"here": {0: core.metrics()}, "away": None}))


def render_http_metrics() -> str:
    """Those of the HTTP processes."""
    counts = RouteCounts("POST", "/v1/completions", [1] * len(STATUSES), [1] * (len(BOUNDS_S) + 1), 1.0)
    return _render(format_http_counts([counts]) + format_response_counts([0] * NUM_NUMBERS))


def _render(text: bytes) -> str:
    rows = [
        (
            f"`{family.name}{'_total' if family.type == 'counter' else ''}`",
            family.type,
            _tell_labels(family),
            family.documentation,
        )
        for family in text_string_to_metric_families(text.decode())
    ]
    return format_table(("name", "kind", "labels", "meaning"), rows)


def _tell_labels(family: Metric) -> str:
    """Labels beyond those of all, with the values that there are where they are words."""
    values: dict[str, dict[str, None]] = {}
    for sample in family.samples:
        for name, value in sample.labels.items():
            if name not in _COMMON_LABELS:
                values.setdefault(name, {})[value] = None
    is_info = family.name.endswith("_info")
    return "; ".join(
        f"`{name}`" if is_info or not _are_words(found) else f"`{name}`: {', '.join(found)}"
        for name, found in values.items()
    )


def _are_words(values: dict[str, None]) -> bool:
    return len(values) > 1 and all(re.fullmatch(r"[a-z0-9_ ]+", value) for value in values)


def render_models() -> str:
    """A table of decoders, and the names of the others."""
    rows = [(f"`{name}`", _code(GGUF_NAMES.get(name, ()))) for name in ARCHITECTURES]
    wrapped, encoders = _code(WRAPPED_ARCHITECTURES), _code(tuple(ENCODERS))
    return (
        f"{format_table(('decoder, in config.json', 'in a GGUF file'), rows)}\n"
        f"The text model alone is read of {wrapped}; requests with images or audio are refused.\n\n"
        f"Encoders: {encoders}.\n"
    )


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
