"""Prompts, pairs and PoolingParams as users write them -> requests for vectors, after every check.

What is wrong is said here, before anything is sent.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import msgspec

from ....ipc.errors import PoolingParamsError, PromptError
from ....ipc.files.file_identity import check_served
from ....ipc.params.pooling_params import EMBEDDING, PoolingParams, PoolingTask
from ....ipc.params.request_options import NO_OPTIONS, RequestOptions
from ....ipc.params.sampling_params import SamplingParams
from ....ipc.protocol.messages import EngineCoreRequest, EngineFacts
from ...text.tokenizer import Tokenizer
from ..prompts import (
    ParsedPrompt,
    Prompt,
    PromptTokenizer,
    Truncation,
    check_request_id,
    parse_prompt,
    refusing_texts,
    require_tokenizer,
)
from .encoder import EncodedText, ModelTexts, TextEncoder, TextPair, read_model_texts
from .state import PoolingInput
from .tasks import check_params

PoolingPrompt = Prompt | TextPair | EncodedText
_ENCODED_AT_ONCE = 1024  # texts: what the tokenizer holds of a token is some hundred bytes
_CHARACTERS_A_MS = 4000
_IDS_A_MS = 20_000
# LangChain's OpenAIEmbeddings does, unless it is told not to.
_ID_HINT = "; ids must be this model's: does the client tokenize for OpenAI's?"
_UNREAD = SamplingParams()


class PoolingProcessor:
    """Checks requests for vectors against one engine's facts. `tokenizer` None: token ids only."""

    def __init__(self, facts: EngineFacts, tokenizer: Tokenizer | None) -> None:
        self.facts = facts
        self._tokenizer = tokenizer
        self._prompts = PromptTokenizer(facts, tokenizer, 0, _ID_HINT)

    @functools.cached_property
    def texts(self) -> ModelTexts:
        """What the model's files say of texts. Raises ModelError."""
        check_served(self.facts.noted, self.facts.model, self.facts.tokenizer)
        return read_model_texts(Path(self.facts.model))

    @property
    def scores_pairs(self) -> bool:
        """Whether `score` judges two texts together, and does not compare their embeddings."""
        return "embed" not in self.facts.tasks

    def check_params(self, params: PoolingParams | None, task: PoolingTask | None) -> PoolingParams:
        """As tasks.check_params, and truncation. Raises PoolingParamsError."""
        checked = check_params(self.facts, params, task)
        most, length = self.facts.max_model_len, checked.truncate_prompt_tokens
        if length is not None and length > most:
            allowed = f"-1, or from 1 to max_model_len={most}"
            raise PoolingParamsError("truncate_prompt_tokens", length, allowed)
        return checked

    def find_prompt(self, name: str | None, text: str | None) -> str:
        """As ModelTexts.find_prompt; but a classifier's texts have none where nobody asks for one."""
        if name is None and text is None and set(EMBEDDING).isdisjoint(self.facts.tasks):
            return ""
        return self.texts.find_prompt(name, text)

    def find_truncation(self, params: PoolingParams) -> Truncation | None:
        """What checked parameters say; None if a prompt that is too long is to be refused."""
        length = params.truncate_prompt_tokens
        if length is None:
            return None
        room = self.facts.max_model_len
        if slots := self.facts.num_kv_tokens:
            room = min(room, slots)
        return Truncation(room if length == -1 else length, params.truncation_side == "right")

    def tokenize(
        self,
        prompts: Sequence[PoolingPrompt],
        params: Sequence[PoolingParams],
        names: Sequence[str],
        *,
        prompt: str = "",
        instruction: str | None = None,
    ) -> list[ParsedPrompt]:
        """Turn prompts, called `names` in errors, into token ids.

        params, one a prompt, say where they are cut. prompt: what goes before each text. Raises PromptError.
        """
        parsed = [_parse(name, value) for name, value in zip(names, prompts, strict=True)]
        groups: dict[tuple[bool, Truncation | None], list[tuple[ParsedPrompt, Any]]] = {}
        for parsed_prompt, prompt_, request_params in zip(parsed, prompts, params, strict=True):
            cut = self.find_truncation(request_params)
            if parsed_prompt.token_ids is None:
                groups.setdefault((isinstance(prompt_, TextPair), cut), []).append((parsed_prompt, prompt_))
            else:
                parsed_prompt.truncation = cut
        for (is_pair, cut), members in groups.items():
            for start in range(0, len(members), _ENCODED_AT_ONCE):
                some = members[start : start + _ENCODED_AT_ONCE]
                if is_pair:
                    self._encode_pairs(some, cut, instruction)
                else:
                    self._encode_texts([parsed_prompt for parsed_prompt, _ in some], cut, prompt)
        for parsed_prompt, request_params in zip(parsed, params, strict=True):
            self._prompts.check(parsed_prompt)
            if request_params.task == "classify" and (padding := self.texts.trailing_padding_id) is not None:
                parsed_prompt.drop_trailing(padding)
        return parsed

    def takes_long(self, prompts: Sequence[PoolingPrompt]) -> bool:
        """Whether `tokenize` takes more than about a millisecond, which an event loop has no time for."""
        return sum(map(_estimate_ms, prompts)) > 1.0

    def make_input(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        params: PoolingParams,
        options: RequestOptions = NO_OPTIONS,
    ) -> PoolingInput:
        """A request, ready to be sent. Raises InputError."""
        name = check_request_id(request_id)
        if params.truncate_prompt_tokens is not None:  # which has been done
            params = msgspec.structs.replace(params, truncate_prompt_tokens=None, truncation_side="right")
        request = EngineCoreRequest(
            request_id=f"{name}-{os.urandom(4).hex()}",
            prompt_token_ids=prompt.packed,
            sampling_params=_UNREAD,
            arrival_time=time.time(),
            options=prompt.salt(options),
            pooling_params=params,
            # Tokenizers tell types apart for models that do not, DistilBERT's and ModernBERT's for two.
            type_start=prompt.type_start if self.facts.has_token_types else None,
        )
        return PoolingInput(name, prompt.token_ids, [request])

    def _encode_texts(self, raw: Sequence[ParsedPrompt], cut: Truncation | None, prompt: str) -> None:
        names = [parsed_prompt.name for parsed_prompt in raw]
        encoder = self._make_encoder(names, [parsed_prompt.text or "" for parsed_prompt in raw])
        texts = [encoder.prepare(parsed_prompt.text or "", prompt) for parsed_prompt in raw]
        with refusing_texts(names, texts):
            for parsed_prompt, encoded_text in zip(raw, encoder.encode_texts(names, texts, cut), strict=True):
                parsed_prompt.token_ids, parsed_prompt.is_encoded = encoded_text.token_ids, True

    def _encode_pairs(
        self,
        members: Sequence[tuple[ParsedPrompt, TextPair]],
        cut: Truncation | None,
        instruction: str | None,
    ) -> None:
        names = [parsed_prompt.name for parsed_prompt, _ in members]
        pairs = [pair for _, pair in members]
        encoder = self._make_encoder([name for name in names for _ in range(2)], list(chain(*pairs)))
        with refusing_texts(names, [pair.query + pair.document for pair in pairs]):
            encoded = encoder.encode_pairs(names, pairs, cut, instruction)
        for (parsed_prompt, _), encoded_text in zip(members, encoded, strict=True):
            parsed_prompt.token_ids, parsed_prompt.type_start = encoded_text
            parsed_prompt.is_encoded = True

    def _make_encoder(self, names: Sequence[str], texts: Sequence[str]) -> TextEncoder:
        return TextEncoder(require_tokenizer(self._tokenizer, names, texts), self.texts)


def _estimate_ms(prompt: Any) -> float:
    """About how long it takes to tokenize a prompt, or to check its token ids."""
    if isinstance(prompt, str):
        return len(prompt) / _CHARACTERS_A_MS
    if isinstance(prompt, TextPair):
        return sum(map(_estimate_ms, prompt))
    if isinstance(prompt, Mapping):
        mapping = cast(Mapping[str, Any], prompt)
        return _estimate_ms(mapping.get("prompt") or mapping.get("prompt_token_ids"))
    ids: Any = prompt.token_ids if isinstance(prompt, EncodedText) else prompt
    return len(ids) / _IDS_A_MS if hasattr(ids, "__len__") else 0.0


def _parse(name: str, prompt: Any) -> ParsedPrompt:
    if isinstance(prompt, TextPair):
        for text in prompt:
            if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise PromptError(name, text, "a text")
        return ParsedPrompt(name, None, None, "")
    if isinstance(prompt, EncodedText):
        # What cannot be encoded would keep the texts that share its message from being sent.
        if prompt.type_start is not None and prompt.type_start not in range(len(prompt.token_ids) + 1):
            raise PromptError(f"{name}.type_start", prompt.type_start, f"0 to {len(prompt.token_ids)}")
        return ParsedPrompt(name, None, prompt.token_ids, "", name, type_start=prompt.type_start)
    return parse_prompt(name, prompt)
