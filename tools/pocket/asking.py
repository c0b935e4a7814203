"""Asking a pocket model in batches, and counting how many of its answers are right."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ...frontend.llm import LLM
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.spec.model_spec import KVCacheDtype
from .tokenizer import render_chat

SEED = 4242  # text drawn for evaluation only; training seeds are small numbers
_MAX_TOKENS = 120


@dataclass(frozen=True, slots=True)
class Score:
    """How many of `total` cases passed, with the failed ones as text."""

    name: str
    total: int
    failures: list[str]

    def __str__(self) -> str:
        passed = self.total - len(self.failures)
        return f"{self.name:<44} {passed:>5} of {self.total:<5} {100 * passed / self.total:6.2f} %"


class Case(NamedTuple):
    """A question, how it is put to the model, and what an answer has to be to be right."""

    question: str
    prompt: str
    is_right: Callable[[str], bool]


def ask(question: str, is_right: Callable[[str], bool], **how: Any) -> Case:
    """A chat that begins with this question. how: of `render_chat`."""
    messages = [{"role": "user", "content": question}]
    return Case(question, render_chat(messages, add_generation_prompt=True, **how), is_right)


@dataclass(frozen=True)
class Pocket:
    """A model that an engine of its own loads and that answers batches of prompts.

    `quantization`, `dtype` and `kv_cache_dtype` are as in EngineArgs.
    """

    folder: Path
    quantization: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"

    @cached_property
    def engine(self) -> LLM:
        """Started by the first question, and ended with this object."""
        how: dict[str, Any] = {
            "quantization": self.quantization,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
        }
        return LLM(str(self.folder), seed=SEED, **how)

    def complete(
        self, prompts: list[str], max_tokens: int, temperature: float = 0.0
    ) -> list[tuple[str, bool]]:
        """The text after each prompt, and whether the model ended it itself; greedy without a temperature."""
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        outputs = [output.outputs[0] for output in self.engine.generate(prompts, params, use_tqdm=False)]
        return [(output.text, output.finish_reason == "stop") for output in outputs]

    def answer(self, cases: Iterable[Case]) -> list[tuple[Case, str]]:
        """Each with the greedy answer, up to the end of the turn."""
        cases = list(cases)
        said = self.complete([case.prompt for case in cases], _MAX_TOKENS)
        return [(case, text) for case, (text, _) in zip(cases, said, strict=True)]

    def score(self, name: str, cases: Iterable[Case]) -> Score:
        """How many of the cases have a right answer."""
        return judge(name, [(case, text, case.is_right(text)) for case, text in self.answer(cases)])


def judge(name: str, answers: list[tuple[Case, str, bool]]) -> Score:
    """Answers with whether each is right."""
    failures = [f"{case.question!r} -> {text!r}" for case, text, is_right in answers if not is_right]
    return Score(name, len(answers), failures)
