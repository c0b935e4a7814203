"""What `quire serve` prints when it is ready: a request that one of its models can answer."""

from __future__ import annotations

import pytest
from quire.frontend.cli.serving.box import format_box


@pytest.mark.parametrize(
    ("models", "path", "asked"),
    [
        ({"a": ("generate",)}, "/v1/chat/completions", '{"model":"a","messages"'),
        ({"v": ("embed", "score"), "a": ("generate",)}, "/v1/chat/completions", '{"model":"a","messages"'),
        ({"v": ("embed", "score")}, "/v1/embeddings", '{"model":"v","input"'),
        ({"r": ("classify", "score")}, "/rerank", '{"model":"r","query"'),
        ({"c": ("classify",)}, "/classify", '{"model":"c","input"'),
        ({"w": ("token_classify",)}, "/pooling", '{"model":"w","input"'),
    ],
)
def test_the_example_asks_a_model_for_what_it_can_do(
    models: dict[str, tuple[str, ...]], path: str, asked: str
) -> None:
    box = format_box("::1", 80, models, "", has_keys=False)
    assert f"curl http://[::1]:80{path} " in box
    assert asked in box
    assert ("models      v, a" in box) == (len(models) > 1)
    assert "formats" not in box
