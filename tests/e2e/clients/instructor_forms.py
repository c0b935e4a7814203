"""Forms by each of instructor's ways to ask for them: `python instructor_forms.py URL KEY`."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

ASKED = [{"role": "user", "content": "What is 12 plus 30?"}]
# What asks for a form that a server can hold a model to. The others only tell the model of it.
MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
)


class Answer(BaseModel):
    """Short enough to be whole whatever the model writes; nothing else may be in it."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["sum", "difference"]
    value: int = Field(ge=0, le=999)


def main() -> None:
    """Raises AssertionError when an answer is not as it should be."""
    base_url, api_key = sys.argv[1:]
    plain = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    for mode in MODES:
        client = instructor.from_openai(plain, mode=mode)
        answer = client.chat.completions.create(
            model="pocket", response_model=Answer, messages=ASKED, max_retries=0, temperature=0
        )
        assert isinstance(answer, Answer), mode
        print(mode, answer)
        if mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            partial = list(
                client.chat.completions.create_partial(
                    model="pocket", response_model=Answer, messages=ASKED, max_retries=0, temperature=0
                )
            )
            assert (partial[-1].kind, partial[-1].value) == (answer.kind, answer.value), mode


if __name__ == "__main__":
    main()
