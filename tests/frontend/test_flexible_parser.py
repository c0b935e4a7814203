"""A user's own parser takes options as vLLM's does."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import quire


def test_a_scripts_options_may_have_underscores_and_come_from_a_file(tmp_path: Path):
    parser = quire.FlexibleArgumentParser()
    quire.EngineArgs.add_cli_args(parser)
    parser.add_argument("--config")
    parser.set_defaults(model="m", enforce_eager=True)
    (tmp_path / "my.yaml").write_text("max_num_seqs: 5\nmax-model-len: 6\n")
    words = ["--max_model_len=7", "--block_size", "32", "--config", str(tmp_path / "my.yaml")]
    given = quire.EngineArgs.from_cli_args(parser.parse_args(words))
    expected = quire.EngineArgs("m", max_model_len=7, block_size=32, max_num_seqs=5, enforce_eager=True)
    assert given == expected


def test_engine_arguments_may_stand_in_a_group_of_the_scripts_own():
    parser = quire.FlexibleArgumentParser()
    group = parser.add_argument_group("Engine arguments")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # groups within groups are deprecated
        assert quire.EngineArgs.add_cli_args(group) is group
    values = vars(parser.parse_args(["--seed", "3"]))
    assert quire.EngineArgs.from_dict(values) == quire.EngineArgs(seed=3)


def test_vllms_names_are_the_classes_that_have_others_here():
    assert quire.AsyncEngineArgs is quire.EngineArgs
    assert quire.AsyncLLMEngine is quire.AsyncLLM
    made = quire.AsyncEngineArgs(model="m", enable_log_requests=False, disable_log_stats=True)
    assert made == quire.EngineArgs("m")
    assert isinstance(quire.FlexibleArgumentParser(), argparse.ArgumentParser)
