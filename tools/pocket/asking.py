"""Asking a pocket model with transformers, in batches, and counting how many of its answers are right."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

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
    """A loaded model that answers batches of prompts."""

    folder: Path
    batch_size: int = 64

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.folder, padding_side="left")

    @cached_property
    def model(self) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(self.folder, dtype="auto").eval()

    def chat(self, questions: list[str], max_tokens: int = 80) -> list[str]:
        """The greedy answer to each question, up to the end of the turn."""
        prompts = [ask(question) for question in questions]
        return [text for text, _ in self.complete(prompts, max_tokens)]

    def complete(
        self, prompts: list[str], max_tokens: int, temperature: float | None = None
    ) -> list[tuple[str, bool]]:
        """The text after each prompt, and whether the model ended it itself; greedy without a temperature."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        results: dict[int, tuple[str, bool]] = {}
        for low in range(0, len(order), self.batch_size):
            chosen = order[low : low + self.batch_size]
            texts = self._complete_batch([prompts[index] for index in chosen], max_tokens, temperature)
            results |= zip(chosen, texts, strict=True)
        return [results[index] for index in range(len(prompts))]

    @torch.inference_mode()
    def _complete_batch(
        self, prompts: list[str], max_tokens: int, temperature: float | None
    ) -> Iterator[tuple[str, bool]]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)
        sampling = {"do_sample": temperature is not None, "temperature": temperature or 1.0, "top_k": 0}
        # transformers' own protocol for `self` does not fit its models
        generate = self.model.generate  # pyright: ignore[reportAttributeAccessIssue]
        output = generate(**inputs, max_new_tokens=max_tokens, **sampling)
        for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
            has_ended = any(token in self.model.config.eos_token_id for token in ids)
            yield str(self.tokenizer.decode(ids, skip_special_tokens=True)), has_ended


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
