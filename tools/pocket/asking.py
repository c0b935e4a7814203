"""Asking a pocket model in batches, and counting how many of its answers are right."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...frontend.llm import LLM
from ...ipc.params.sampling_params import SamplingParams
from .tokenizer import render_chat

SEED = 4242  # text drawn for evaluation only; training seeds are small numbers


@dataclass(frozen=True, slots=True)
class Score:
    """How many of `total` cases passed, with the failed ones as text."""

    name: str
    total: int
    failures: list[str]

    def __str__(self) -> str:
        passed = self.total - len(self.failures)
        return f"{self.name:<44} {passed:>5} of {self.total:<5} {100 * passed / self.total:6.2f} %"


def ask(question: str) -> str:
    """The prompt of a chat that begins with `question`."""
    return render_chat([{"role": "user", "content": question}], add_generation_prompt=True)


@dataclass(frozen=True)
class Pocket:
    """A model that an engine of its own loads and that answers batches of prompts.

    `quantization` and `dtype` are as in EngineArgs.
    """

    folder: Path
    quantization: str | None = None
    dtype: str = "auto"

    @cached_property
    def engine(self) -> LLM:
        """Started by the first question, and ended with this object."""
        return LLM(str(self.folder), quantization=self.quantization, dtype=self.dtype, seed=SEED)

    def chat(self, questions: list[str], max_tokens: int = 80) -> list[str]:
        """The greedy answer to each question, up to the end of the turn."""
        prompts = [ask(question) for question in questions]
        return [text for text, _ in self.complete(prompts, max_tokens)]

    def complete(
        self, prompts: list[str], max_tokens: int, temperature: float = 0.0
    ) -> list[tuple[str, bool]]:
        """The text after each prompt, and whether the model ended it itself; greedy without a temperature."""
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        outputs = [output.outputs[0] for output in self.engine.generate(prompts, params, use_tqdm=False)]
        return [(output.text, output.finish_reason == "stop") for output in outputs]


def score_chat(
    pocket: Pocket, name: str, cases: list[tuple[str, str]], is_right: Callable[[str, str], bool]
) -> Score:
    """Asks each case's question; `is_right` judges an answer by what was expected."""
    answers = pocket.chat([question for question, _ in cases])
    failures = [
        f"{question!r} -> {answer!r}"
        for (question, expected), answer in zip(cases, answers, strict=True)
        if not is_right(answer, expected)
    ]
    return Score(name, len(cases), failures)
