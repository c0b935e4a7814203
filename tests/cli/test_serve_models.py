"""Which engines `quire serve` serves: one of its own, daemons', or both."""

from __future__ import annotations

from typing import Any

import pytest
from quire.frontend import async_llm
from quire.frontend.cli.commands import serve
from quire.frontend.http import server
from quire.ipc.errors import ConfigError


class Starter:
    """Starts nothing."""

    def __init__(self, args: Any) -> None:
        self.model = args.config.model.served_model_name
        self.is_stopped = False

    def wait_until_attachable(self) -> None:
        pass

    def stop(self) -> None:
        self.is_stopped = True


def test_a_model_is_served_beside_those_of_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    starters: list[Starter] = []

    def start(args: Any) -> Starter:
        starters.append(Starter(args))
        return starters[-1]

    served: list[Any] = []
    monkeypatch.setattr(serve, "DaemonStarter", start)
    monkeypatch.setattr(serve, "_serve", lambda *given: served.append(given[3]) or 0)
    own = ["pocket", "--port", "0", "--name", "own", "--served-model-name", "chat"]
    assert serve.run([*own, "--attach", "a", "--attach", "b"]) == 0
    assert served == [["own", "a", "b"]]
    assert [(one.model, one.is_stopped) for one in starters] == [("chat", True)]
    assert serve.run(["--port", "0", "--attach", "a"]) == 0
    assert served[1:] == [["a"]]
    assert len(starters) == 1
    for options in (["--name", "own"], ["--block-size", "8"]):
        with pytest.raises(ConfigError, match="not given with --attach"):
            serve.run(["--port", "0", "--attach", "a", *options])


def test_a_model_is_not_taken_for_one_more_of_its_names() -> None:
    with pytest.raises(
        ConfigError, match="served_model_name='chat best \\./model': expected a model beside it"
    ):
        serve.run(["--port", "0", "--served-model-name", "chat", "best", "./model"])


def test_a_server_says_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(async_llm, "AsyncLLM", lambda **_: None)
    monkeypatch.setattr(server, "run_server", lambda *_: 0)
    assert serve.run(["--port", "0", "--attach", "a"]) == 0
    assert capsys.readouterr().err == "quire: serve 0 has ended\n"
    assert serve.run(["--port", "0", "--attach", "a", "--log-format", "json"]) == 0
    assert capsys.readouterr().err == ""
