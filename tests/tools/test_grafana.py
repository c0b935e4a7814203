"""The Grafana dashboard asks for series that /metrics has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes import make_config
from prometheus_client.parser import text_string_to_metric_families
from quire.core.engine.engine_core import EngineCore
from quire.frontend.http.observe.metrics import format_metrics

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "tools" / "grafana" / "quire.json").read_text()
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def list_series() -> set[str]:
    core = EngineCore(make_config(), num_blocks=8)
    text = format_metrics({"fake": {0: core.metrics()}}).decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_series_that_there_are(panel: dict[str, Any]):
    expressions = " ".join(target["expr"] for target in panel["targets"])
    asked = set(re.findall(r"quire:\w+", expressions))
    assert asked <= list_series()
    assert asked or "process_resident_memory_bytes" in expressions
    assert panel["description"]
    assert expressions.count("(") == expressions.count(")")


def test_the_variables_are_read_from_series_that_there_are():
    queries = " ".join(str(variable["query"]) for variable in DASHBOARD["templating"]["list"])
    asked = set(re.findall(r"quire:\w+", queries))
    assert asked
    assert asked <= list_series()


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
