"""Lets the tests beside it import their helpers, and shares the tokenizers that take time to build."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from frontend_fakes import write_byte_level_folder, write_metaspace_folder
from quire.frontend.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level_folder(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def metaspace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_metaspace_folder(tmp_path_factory.mktemp("metaspace"))


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_level_folder)


@pytest.fixture(scope="session")
def metaspace(metaspace_folder: Path) -> Tokenizer:
    return load_tokenizer(metaspace_folder)
