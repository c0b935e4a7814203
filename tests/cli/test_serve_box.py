"""What `quire serve` prints when it is ready: a request that one of its models can answer."""

from __future__ import annotations

import pytest
from quire.frontend.cli.commands.serve import Place, format_box


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
    box = format_box(Place("::1", 80), models, "", has_keys=False)
    assert f"curl http://[::1]:80{path} " in box
    assert asked in box
    assert ("models      v, a" in box) == (len(models) > 1)
    assert "formats" not in box


def test_a_unix_socket_and_tls_are_in_the_example() -> None:
    models = {"a": ("generate",)}
    box = format_box(Place("127.0.0.1", 0, uds="/run/my models/q.sock"), models, "", has_keys=False)
    assert "curl --unix-socket '/run/my models/q.sock' http://localhost/v1/chat/completions" in box
    assert "socket      /run/my models/q.sock" in box
    place = Place("0.0.0.0", 8443, has_tls=True)
    box = format_box(place, models, "", has_keys=True, grpc_address="0.0.0.0:50051")
    assert "OpenAI API  https://127.0.0.1:8443/v1" in box
    assert "gRPC        127.0.0.1:50051 (TLS)\n" in box


def test_an_engine_is_named_after_where_its_server_listens() -> None:
    assert Place("127.0.0.1", 8000).engine_name == "serve-8000"
    assert Place("127.0.0.1", 0, uds="/run/my models.sock").engine_name == "serve-my-models"
    assert len(Place("127.0.0.1", 0, uds=f"/run/{'x' * 90}").engine_name) == 32
