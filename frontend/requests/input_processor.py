"""Prompts and SamplingParams as users write them -> EngineCoreRequests, after every check that needs a
tokenizer or the model's limits. What is wrong is said here, before anything is sent.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...ipc.errors import SamplingParamsError
from ...ipc.params.beam_search import BeamSearch
from ...ipc.params.request_options import NO_OPTIONS, RequestOptions
from ...ipc.params.sampling_params import MAX_SEED, RequestOutputKind, SamplingParams, count_alternatives
from ...ipc.params.structured_outputs import StructuredOutputsParams
from ...ipc.protocol.messages import EngineCoreRequest, EngineFacts
from ...ipc.protocol.token_lists import MAX_BAD_WORD_TOKENS, drop_packed, pack_token_lists
from ..text.tokenizer import Tokenizer
from .beams import BeamSearchState, begin_search
from .prompts import (
    ParsedPrompt,
    Prompt,
    PromptTokenizer,
    check_request_id,
    describe_token_ids,
    find_truncation,
    parse_prompt,
)
from .vectors.tasks import check_task

if TYPE_CHECKING:
    from ..formats.grammars.rules import OutputRules
    from ..formats.output_format import OutputFormat
    from ..formats.schemas.compiler import GrammarCompiler
import hashlib


class SeedSource:
    """Draws from the system's entropy; or, with a seed of an engine's owner, the same ones in every run.

    Then the n-th request has the n-th seed, so a program that makes the same requests in the same order gets
    the same tokens again. Threads may share it; the order is then theirs.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._numbers = itertools.count()

    def draw(self) -> int:
        """A seed of 63 bits for the next request; one with a seed of its own takes its turn too."""
        number = next(self._numbers)
        if self._seed is None:
            return int.from_bytes(os.urandom(8), "little") >> 1
        digest = hashlib.blake2b(f"{self._seed} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


_LONG_TEXT = 4000  # characters; to tokenize more takes over a millisecond
_LONG_IDS = 20_000  # token ids; to check more, likewise


class EngineInput(msgspec.Struct, frozen=True):
    """A request, ready to be sent: one EngineCoreRequest a sequence.

    `params` are the user's, cloned. `hides_cumulative_logprob`: logprobs only serve to choose the best.
    `beam_search`: what becomes of the answer to the one sequence, which begins it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    sequences: list[EngineCoreRequest]
    hides_cumulative_logprob: bool = False
    beam_search: BeamSearchState | None = None


PreparedParams = EngineCoreRequest
"""A request that still lacks its prompt, id and time: SamplingParams, checked and cloned, with what of them
takes a tokenizer. Requests take copies."""


class PreparedSearch(PreparedParams, array_like=True, frozen=True, gc=False, kw_only=True):
    """Those of a beam search, whose width sampling_params.n is. No engine sees it: `begin_search`."""

    beam_search: BeamSearch


class InputProcessor:
    """Checks requests against one engine's facts. `tokenizer` None: token ids only."""

    def __init__(self, facts: EngineFacts, tokenizer: Tokenizer | None, seed: int | None = None) -> None:
        """seed: what requests without one get theirs from, see SeedSource."""
        self.seeds = SeedSource(seed)
        self._facts = facts
        self._tokenizer = tokenizer
        self._prompts = PromptTokenizer(facts, tokenizer, num_generated=1)
        self._grammars: GrammarCompiler | None = None  # made for the first grammar

    @functools.cached_property
    def output_format(self) -> OutputFormat | None:
        """How the model writes thoughts and tool calls; None: only text, or there is no tokenizer.

        Raises ConfigError when the engine was told a parser that is not known here.
        """
        if self._tokenizer is None:
            return None
        from ..formats.known_formats import choose_output_format

        facts = self._facts
        return choose_output_format(self._tokenizer, facts.tool_call_parser, facts.reasoning_parser)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PreparedParams,
        options: RequestOptions = NO_OPTIONS,
        arrival_time: float | None = None,
        *,
        drawn_seed: int | None = None,
    ) -> EngineInput:
        """Check and tokenize one request. Raises PromptError, SamplingParamsError or InputError.

        drawn_seed: of `seeds`, drawn where the order of requests is known; None: it is drawn here.
        """
        prepared = params if isinstance(params, PreparedParams) else self.prepare_params(params)
        tokenized = self.tokenize([prompt], [prepared])[0]
        return self.make_input(request_id, tokenized, prepared, options, arrival_time, drawn_seed=drawn_seed)

    def tokenize(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[PreparedParams] | None = None,
        *,
        add_special_tokens: bool = True,
        is_many: bool = False,
    ) -> list[ParsedPrompt]:
        """Check prompts and turn texts into token ids, many at once on all cores.

        `params`, one a prompt, say where it is cut. `is_many` numbers them in errors: `prompts[3]` rather
        than `prompt`.
        """
        names = [f"prompts[{place}]" for place in range(len(prompts))] if is_many else ["prompt"]
        parsed = [parse_prompt(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
        for parsed_prompt, request_params in zip(parsed, params or (), strict=params is not None):
            parsed_prompt.truncation = find_truncation(request_params.sampling_params, self._facts)
        self._prompts.tokenize(parsed, add_special_tokens)
        return parsed

    def takes_long(self, prompt: Prompt, params: SamplingParams | PreparedParams) -> bool:
        """Whether `process` takes more than about a millisecond, which an event loop has no time for."""
        text: Any = prompt
        if isinstance(prompt, Mapping):
            text = prompt.get("prompt") or prompt.get("prompt_token_ids")
        if hasattr(text, "__len__") and len(text) > (_LONG_TEXT if isinstance(text, str) else _LONG_IDS):
            return True
        if not isinstance(params, SamplingParams):
            return False
        if params.structured_outputs is not None:  # to compile a grammar takes milliseconds
            return True
        words = params.bad_words
        return words is not None and sum(map(len, words)) > _LONG_TEXT // 2  # each is encoded twice

    def prepare_params(
        self, params: SamplingParams, encoded_bad_words: list[list[int]] | None = None
    ) -> PreparedParams:
        """Check parameters once for all requests that they are given to.

        `encoded_bad_words`: token ids of `list_bad_word_texts`, where they have been encoded elsewhere.
        Raises SamplingParamsError.
        """
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SamplingParamsError("sampling_params", params, "a SamplingParams")
        check_task(self._facts, "generate")
        params = params.clone()
        self._check_params(params)
        words = params.bad_words if self._tokenizer is not None else None
        bad_words = self._pair_bad_words(words, encoded_bad_words) if words else []
        find_truncation(params, self._facts)  # which may have no room
        return PreparedParams(
            request_id="",
            prompt_token_ids=b"",
            sampling_params=params,
            arrival_time=0.0,
            token_lists=pack_token_lists(params, bad_words, self._facts.vocab_size),
            grammar=self._compile(params),
            extra_args=msgspec.json.encode(params.extra_args).decode() if params.extra_args else "",
        )

    def bind_rules(self, prepared: PreparedParams, rules: OutputRules) -> PreparedParams:
        """The parameters for a turn with tools or thoughts. Raises SamplingParamsError."""
        grammar = self._compile(prepared.sampling_params, rules)
        return msgspec.structs.replace(prepared, grammar=grammar, purpose=rules.purpose)

    def _compile(self, params: SamplingParams, rules: OutputRules | None = None) -> str:
        """The grammar that the output follows, empty for none."""
        wanted = params.structured_outputs
        if rules is not None and not rules.binds(wanted is not None):
            rules = None
        if wanted is None and rules is None:
            return ""
        if self._tokenizer is None:
            field, what = ("tools", "given") if wanted is None else ("structured_outputs", wanted.kind)
            raise SamplingParamsError(field, what, "None: there is no tokenizer")
        check_has_end(self._facts, wanted)
        if self._grammars is None:
            from ..formats.schemas.compiler import GrammarCompiler

            self._grammars = GrammarCompiler(self._tokenizer)
        return self._grammars.compile(wanted, rules=rules)

    def prepare_beam_search(
        self, params: SamplingParams, search: BeamSearch, width_name: str = "beam_width"
    ) -> PreparedParams:
        """As `prepare_params`, for a beam search that ends as `params` say; params.n becomes its width.

        width_name: what the user calls the width, for errors.
        """
        params = params.clone()
        params.n, params.best_of, params.output_kind = search.width, None, RequestOutputKind.FINAL_ONLY
        most, size = self._facts.max_num_seqs, self._facts.vocab_size
        if search.width > most:
            raise SamplingParamsError(width_name, search.width, f"at most max_num_seqs={most}")
        num_candidates = search.count_candidates(len(self._facts.eos_token_ids))
        if num_candidates > size:
            allowed = f"fewer: {num_candidates} tokens would be looked at, and the vocabulary has {size}"
            raise SamplingParamsError(width_name, search.width, allowed)
        return PreparedSearch(**msgspec.structs.asdict(self.prepare_params(params)), beam_search=search)

    def prepare_each(self, params: Sequence[SamplingParams | PreparedParams]) -> list[PreparedParams]:
        """`prepare_params` of each; one that is there many times is checked once."""
        prepared: dict[int, PreparedParams] = {}
        for each in params:
            if id(each) not in prepared:
                prepared[id(each)] = each if isinstance(each, PreparedParams) else self.prepare_params(each)
        return [prepared[id(each)] for each in params]

    def make_input(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        params: SamplingParams | PreparedParams,
        options: RequestOptions = NO_OPTIONS,
        arrival_time: float | None = None,
        *,
        drawn_seed: int | None = None,
    ) -> EngineInput:
        """Check the parameters and build best_of, or n, sequences. drawn_seed: as for `process`."""
        request_id = check_request_id(request_id)
        prepared = params if isinstance(params, PreparedParams) else self.prepare_params(params)
        sampling_params = copy.copy(prepared.sampling_params)
        drawn = self.seeds.draw() if drawn_seed is None else drawn_seed
        seed = drawn if sampling_params.seed is None else sampling_params.seed
        arrived = time.time() if arrival_time is None else arrival_time
        ignores_eos = sampling_params.ignore_eos and not prepared.grammar
        hides = sampling_params.num_sequences > sampling_params.n and sampling_params.logprobs is None
        template = msgspec.structs.replace(
            prepared,
            request_id=f"{request_id}-{os.urandom(4).hex()}",
            prompt_token_ids=prompt.packed,
            sampling_params=sampling_params,
            arrival_time=arrived,
            eos_token_ids=[] if ignores_eos else list(self._facts.eos_token_ids),
            options=prompt.salt(options),
        )
        search = None
        if isinstance(template, PreparedSearch):
            search, first = begin_search(template, template.beam_search, self._facts.max_model_len)
            sequences = [first]
        else:
            sequences = _make_sequences(template, seed, hides, self._facts.vocab_size)
        return EngineInput(
            request_id, prompt.text, prompt.token_ids, sampling_params, arrived, sequences, hides, search
        )

    def _check_params(self, params: SamplingParams) -> None:
        """What SamplingParams cannot check on its own: the vocabulary, the engine's caps, the tokenizer."""
        self._check_num_logprobs("logprobs", params.logprobs)
        self._check_num_logprobs("prompt_logprobs", params.prompt_logprobs)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            largest = max(getattr(params, name) or (), default=0)
            if largest >= self._facts.vocab_size:
                raise SamplingParamsError(name, largest, describe_token_ids(self._facts.vocab_size))
        if params.extra_args and not self._facts.logits_processors:
            allowed = "None: this engine has no logits processors (--logits-processors), which would read it"
            raise SamplingParamsError("extra_args", params.extra_args, allowed)
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise SamplingParamsError(name, getattr(params, name), "None: there is no tokenizer")
            params.detokenize = False

    def _check_num_logprobs(self, name: str, value: int | None) -> None:
        cap, size = self._facts.max_logprobs, self._facts.vocab_size
        if value is None:
            return
        if value > size:
            raise SamplingParamsError(name, value, f"at most {size}, the vocabulary, or -1 for all of it")
        if cap != -1 and (value > cap or (value == -1 and size > cap)):
            raise SamplingParamsError(
                name, value, f"at most max_logprobs={cap} (an engine argument; -1: no bound)"
            )

    def _pair_bad_words(self, words: list[str], encoded: list[list[int]] | None) -> list[list[int]]:
        """Each word as it is at a text's beginning, and after a space where that gives other tokens."""
        assert self._tokenizer is not None
        if encoded is None:
            encoded = self._tokenizer.encode_batch(list_bad_word_texts(words), add_special_tokens=False)
        pairs: list[list[int]] = []
        for word, plain, spaced in zip(words, encoded[::2], encoded[1::2], strict=True):
            if not plain:
                raise SamplingParamsError("bad_words", word, "texts that have tokens")
            pairs.append(plain)
            if spaced[-len(plain) :] != plain:  # a sequence that ends in the plain one is caught by it
                pairs.append(spaced)
        num_ids = sum(map(len, pairs))
        if num_ids > MAX_BAD_WORD_TOKENS:
            allowed = f"words of at most {MAX_BAD_WORD_TOKENS} token ids, those after a space included"
            raise SamplingParamsError("bad_words", f"{num_ids} token ids", allowed)
        if max(itertools.chain.from_iterable(pairs), default=0) >= self._facts.vocab_size:
            wrong = next(
                token_id for token_id in itertools.chain(*pairs) if token_id >= self._facts.vocab_size
            )
            raise SamplingParamsError("bad_words", wrong, "texts within the model's vocabulary")
        return pairs


def check_has_end(facts: EngineFacts, wanted: StructuredOutputsParams | None) -> None:
    """Only an end of sequence says that an output which follows a grammar is complete."""
    if not facts.eos_token_ids:
        field, what = ("tools", "given") if wanted is None else ("structured_outputs", wanted.kind)
        raise SamplingParamsError(field, what, "None: this model names no end of sequence")


def list_bad_word_texts(words: Sequence[str]) -> list[str]:
    """What is encoded of bad words: two texts a word, at a text's beginning and after a space."""
    return [text for word in words for text in (word.lstrip() or word, " " + word.lstrip())]


def _make_sequences(
    template: EngineCoreRequest, seed: int, scores: bool, vocab_size: int
) -> list[EngineCoreRequest]:
    """One request a sequence, each with `seed` plus its index.

    `scores`: logprobs of the tokens themselves are computed, to choose the best sequences.
    """
    params = template.sampling_params
    sequences: list[EngineCoreRequest] = []
    for index in range(params.num_sequences):
        sequence_params = copy.copy(params)  # checked already; `replace` would check each one again
        sequence_params.n, sequence_params.best_of, sequence_params.seed = 1, None, _wrap_seed(seed + index)
        drop_packed(sequence_params)
        if scores:
            sequence_params.logprobs = 0
        sequence_params.logprobs = count_alternatives(sequence_params.logprobs, vocab_size)
        sequence_params.prompt_logprobs = count_alternatives(sequence_params.prompt_logprobs, vocab_size)
        sequence_params.truncate_prompt_tokens = None  # that has been done
        sequence_params.truncation_side = "left"
        if index:  # one copy of the prompt's logprobs is enough
            sequence_params.prompt_logprobs = None
        name = template.request_id if params.num_sequences == 1 else f"{index}_{template.request_id}"
        count = 0 if index else params.num_sequences
        sequence = msgspec.structs.replace(
            template, request_id=name, sampling_params=sequence_params, num_sequences=count
        )
        sequences.append(sequence)
    return sequences


def _wrap_seed(seed: int) -> int:
    """Back into 64 bits with a sign; SamplingParams reads -1 as no seed, so that is left out."""
    if seed > MAX_SEED:
        seed -= 2**64
    return seed if seed != -1 else MAX_SEED
