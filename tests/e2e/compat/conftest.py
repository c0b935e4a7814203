"""What vLLM's own server tests check, as scenarios of our own, over the shared server.

docs/compatibility.md names the checks that are met in another way, and those that are not.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from served import Ask, Served


@pytest.fixture(scope="module")
def client(shared_server: Served) -> Iterator[openai.OpenAI]:
    with shared_server.client() as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(pocket_folder())


@pytest.fixture
def ask(shared_server: Served) -> Ask:
    return shared_server.ask
