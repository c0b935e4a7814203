"""`--config FILE.yaml`, options spelled with underscores, and one model a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from quire.frontend.cli.commands import daemon, serve
from quire.frontend.cli.engine_choice import choose_model
from quire.frontend.cli.parser import UsageError
from quire.frontend.cli.serve_options import make_parser
from quire.ipc.errors import ConfigError
from refusals import Refusal, refusals

FILE = """
model: ./some-model
port: 9000
max_model_len: 512
drain-timeout: 2.5
share_port: true
enable-prefix-caching: false
insecure-no-key: false
api-key: [one, two]
hf_overrides: {is_matryoshka: true, sizes: [1, 2]}
revision:
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return str(path)


def test_a_file_says_what_the_command_line_would(config: str) -> None:
    options = make_parser().parse(["--config", config])
    assert (options.model, options.port, options.max_model_len) == ("./some-model", 9000, 512)
    assert (options.drain_timeout, options.share_port, options.insecure_no_key) == (2.5, True, False)
    assert options.enable_prefix_caching is False
    assert options.api_key == ["one", "two"]
    assert options.hf_overrides == '{"is_matryoshka": true, "sizes": [1, 2]}'
    assert options.revision is None


def test_the_command_line_wins_over_the_file(config: str) -> None:
    options = make_parser().parse(
        ["--port=1", f"--config={config}", "--api_key", "k", "--enable-prefix-caching"]
    )
    assert (options.port, options.api_key, options.enable_prefix_caching) == (1, ["k"], True)
    assert choose_model(["other", "--config", config], "other", options.model) == "other"
    assert choose_model(["--config", config], None, options.model) == "./some-model"


@refusals("config_files")
def test_a_file_that_cannot_be_used_is_refused_with_the_place(refusal: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"

    def parse(text: str) -> object:
        path.write_text(text)
        return make_parser().parse(["--config", str(path)])

    refusal.check(parse, tmp_path)


def test_a_file_that_is_not_there_or_one_too_many_is_refused(config: str) -> None:
    with pytest.raises(ConfigError, match=r"config='/no/such\.yaml': expected a file that can be read"):
        make_parser().parse(["--config", "/no/such.yaml"])
    with pytest.raises(ConfigError, match="config='/dev/zero': expected a file of at most"):
        make_parser().parse(["--config", "/dev/zero"])
    with pytest.raises(ConfigError, match="one file"):
        make_parser().parse(["--config", config, "--config", config])


def test_options_may_be_spelled_with_underscores() -> None:
    options = make_parser().parse(["--max_model_len", "7", "--enable_prefix_caching", "--drain_timeout=3"])
    assert (options.max_model_len, options.enable_prefix_caching, options.drain_timeout) == (7, True, 3.0)
    with pytest.raises(UsageError, match=r"--max_modellen: not an option .* did you mean '--max-model-len'"):
        make_parser().parse(["--max_modellen", "7"])
    with pytest.raises(UsageError, match="--ssl-cipher: not an option of 'quire serve', see"):
        make_parser().parse(["--ssl-cipher", "x"])


@pytest.mark.parametrize("run", [serve.run, daemon._start])
def test_two_models_in_one_command_are_an_error(run: object) -> None:
    assert callable(run)
    for argv in (["a", "--model", "b"], ["--model=a", "--model", "b"]):
        with pytest.raises(ConfigError, match="model='a, b': expected one model"):
            run(argv)


def test_yaml_is_loaded_by_who_gives_a_file_only() -> None:
    code = (
        "import sys; from quire.frontend.cli.serve_options import make_parser; make_parser().parse([]);"
        "assert 'yaml' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
