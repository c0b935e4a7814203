"""LLM: offline generation, and vectors of texts. Prompts in, finished outputs back, in order."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack, cast

from ..ipc.errors import ConfigError, InputError, PromptError
from ..ipc.params.absent_arguments import check_absent
from ..ipc.params.beam_search import BeamSearchParams
from ..ipc.params.pooling_params import PoolingParams, PoolingTask
from ..ipc.params.request_options import read_priorities
from ..ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ..ipc.protocol.engine_views import DEFAULT_METRICS_PREFIX, SchedulerStats
from .llm_engine import LLMEngine
from .models.model_files import POCKET
from .observe.trace_file import read_profile_folder
from .options.engine_args import EngineArgs
from .outputs import RequestOutput
from .request_batch import RequestBatch, run_batches
from .requests.beam_search import BeamSearchOutput, prepare_beam_search, to_beam_search_output
from .requests.input_processor import EngineInput, PreparedParams
from .requests.prompts import ParsedPrompt, Prompt, is_many
from .requests.vectors.tasks import check_task
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .client.remote_daemon import Attachment
    from .observe.metric_values import Metric
    from .requests.vectors.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from .vector_calls import PoolingCalls, PoolingOptions

_NO_CODE = (
    "not possible: Quire's processes take typed messages and run nobody's code. stats(), get_metrics(), "
    "start_profile() and reset_prefix_cache() ask an engine; logits_processors brings code to a worker"
)
_CHAT_ARGUMENTS = (
    *("sampling_params", "use_tqdm", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "priority", "tools", "tool_choice", "parallel_tool_calls"),
)

Message = Mapping[str, Any]
Params = SamplingParams | PreparedParams | Sequence[SamplingParams | PreparedParams] | None


class LLM:
    """A model, its engine and its processes. Use it with `with`, or call `close`, or just drop it.

    Takes the arguments of EngineArgs by name; or `attach`, the name of a running daemon, whose engine it then
    shares with others and leaves running. With attach='tcp://HOST:PORT' that is a daemon of another machine:
    `keys` is the folder of this client's keys, and `model` (and `tokenizer`) has copies of what the engine's
    folder has beside the weights. With data_parallel_size engines share the requests, and one that is lost
    costs none of them. With `seed`, a program that makes the same requests in the same order gets the same
    tokens, also of requests without a seed of their own. Calls wait until all their requests have finished,
    `enqueue` apart; an exception or Ctrl-C in one ends its requests and leaves the engine usable.

    Threads may share it: what several generate at the same time runs in one batch, other calls are answered
    meanwhile, and each call raises only what is its own. After `close`, and in a fork of this process, every
    call raises EngineDeadError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        attach: Attachment | None = None,
        keys: str | os.PathLike[str] | None = None,
        client_weight: float = 1.0,
        profiler_config: Mapping[str, Any] | None = None,
        **args: Any,
    ) -> None:
        """Start an engine, or attach to a daemon's. `model` is the pocket model if nothing is given.

        client_weight: with `attach`, this client's share under the fair policy. profiler_config: vLLM's, of
        which 'torch_profiler_dir' is where `stop_profile` writes; default: ./quire_profile. Raises
        ConfigError or ModelError (ValueErrors), EngineStartError, or DaemonError when no daemon of that name
        runs.
        """
        from .client.remote_daemon import check_unattached, choose_attachment

        self._profile_folder = read_profile_folder(profiler_config)
        if attach is not None:
            tokenizer = args.pop("tokenizer", None)
            check_attach_arguments(args)
            daemon = choose_attachment(attach, keys, model, tokenizer)
            self.llm_engine = LLMEngine.attach(daemon, client_kind="LLM", weight=client_weight)
        else:
            check_unattached(keys=keys)
            values = {"model": POCKET if model is None else model, **args}
            if values.get("max_gap_ms") is None:
                values["max_gap_ms"] = 0  # calls wait for whole answers: nobody sees a gap
            self.llm_engine = LLMEngine.from_engine_args(EngineArgs.from_dict(values))
        self._request_numbers = itertools.count()
        self._enqueued: deque[RequestBatch[RequestOutput]] = deque()  # that nobody waits for yet

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """vLLM's other spelling of the constructor."""
        return cls(**vars(engine_args))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; the outputs are in the prompts' order.

        prompts: a text, a list of token ids, a dict with 'prompt' or 'prompt_token_ids' (and 'cache_salt'),
        or a list of those. sampling_params: one for all, or one a prompt; None takes the model's defaults.
        priority: one a prompt, with scheduling_policy='priority'. use_tqdm: a callable replaces tqdm. others:
        vLLM's, of which each is taken where it asks for nothing (ipc/params/absent_arguments.py).
        A prompt or parameter that cannot be used raises a ValueError before anything runs. A request that
        the engine fails comes back with finish_reason 'error' and the cause in `error`; the others are
        unaffected.
        """
        check_absent(others, ("priority", "use_tqdm", "sampling_params"))
        return run_batches([self._make_batch(prompts, sampling_params, priority)], use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[str]:
        """Hand prompts to the engine as `generate` does and return at once, with an id for each.

        Their outputs are kept until `wait_for_completion`.
        """
        check_absent(others, ("priority", "sampling_params"))
        batch = self._make_batch(prompts, sampling_params, priority)
        try:
            batch.add()
            self._enqueued.append(batch)
        except BaseException:  # Ctrl-C too: what was added would run on for nobody
            batch.forget()
            raise
        return batch.ids.copy()

    def wait_for_completion(self, *, use_tqdm: bool | Callable[..., Any] = True) -> list[RequestOutput]:
        """Wait for all that was enqueued since the last call; the outputs are in that order.

        `request_id` of an output is the id that `enqueue` returned. Of threads that wait at the same time
        each gets other requests' outputs. An exception or Ctrl-C ends the requests that it waited for.
        """
        self.llm_engine.check_usable()
        batches: list[RequestBatch[RequestOutput]] = []
        with contextlib.suppress(IndexError):  # empty
            while True:
                batches.append(self._enqueued.popleft())
        return run_batches(batches, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or many (a list of message lists).

        The text comes from the model's chat template, or from `chat_template`, which is the caller's own;
        both run in a sandbox, within bounds of time and memory. tools, tool_choice and parallel_tool_calls
        are those of OpenAI's chats, for all conversations, and bind the output likewise. Of a model whose
        format is known, an answer's `message` has its calls and its thoughts, which its text has as they
        were generated. Otherwise as `generate`.
        """
        from .requests.chat import ChatTurns  # with the readers of outputs

        check_absent(others, _CHAT_ARGUMENTS)
        self.llm_engine.check_usable()
        check_task(self.llm_engine.facts, "generate")
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise PromptError("messages", messages, "token ids to generate(): this engine has no tokenizer")
        known = self.llm_engine.input_processor.output_format
        eos_token_ids = self.llm_engine.facts.eos_token_ids
        turns = ChatTurns(tokenizer, known, tools, tool_choice, parallel_tool_calls, eos_token_ids)
        texts = tokenizer.find_chat_template(chat_template).render_each(
            _as_conversations(messages),
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
            turns.tools,
        )
        processor = self.llm_engine.input_processor
        params = processor.prepare_each(self._params_of_each(sampling_params, len(texts)))
        tokenized = processor.tokenize(texts, params, add_special_tokens=False, is_many=True)
        bound = turns.prepare(processor, params, tokenized)
        batch = RequestBatch[RequestOutput](self.llm_engine, self._make_requests(tokenized, bound, priority))
        outputs = run_batches([batch], use_tqdm)
        for output in outputs:
            turns.parse(output)
        return outputs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best sequences of each prompt, best first; the outputs are in the prompts' order.

        Raises RequestFailedError if the engine fails one of them; otherwise as `generate`.
        """
        check_absent(others, ("params", "use_tqdm"))
        self.llm_engine.check_usable()
        prepared = prepare_beam_search(self.llm_engine.input_processor, params)
        outputs = run_batches([self._make_batch(prompts, prepared, None)], use_tqdm)
        tokenizer, shows_eos = self.get_tokenizer(), params.include_stop_str_in_output
        return [to_beam_search_output(output, tokenizer, shows_eos) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt; prompts, priority and use_tqdm are as for `generate`.

        pooling_params: one for all, or one a prompt. truncate_prompt_tokens: longer prompts are cut; -1: to
        what the model takes. prompt_name: which of the model's prompts goes before each text, or `prompt`,
        the caller's own. A prompt or parameter that cannot be used, and a model that has no embeddings, raise
        a ValueError before anything runs. A request that the engine fails comes back with the cause in
        `error`; the others are unaffected.
        """
        from .requests.vectors.outputs import to_embedding

        outputs = self._pooling.encode(prompts, pooling_params, "embed", **options)
        return [to_embedding(output) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[ClassificationRequestOutput]:
        """What the model's classifier makes of each prompt; otherwise as `embed`."""
        from .requests.vectors.outputs import to_classification

        outputs = self._pooling.encode(prompts, pooling_params, "classify", **options)
        return [to_classification(output) for output in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit: one with one, one with each of many, or each of many with its own.

        A model that judges pairs does so, and of a pair that is too long the second text is cut if asked;
        `instruction` is what one that takes any is to judge by. With a model that embeds texts it is the
        cosine of their embeddings, with its prompts for queries and for documents. Otherwise as `embed`.
        """
        check_absent(others, ("truncate_prompt_tokens", "use_tqdm", "pooling_params", "instruction"))
        return self._pooling.score(
            data_1,
            data_2,
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            instruction=instruction,
            use_tqdm=use_tqdm,
        )

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What is pooled of each prompt as raw numbers; pooling_task: that of the params, else 'embed'.

        Otherwise as `embed`.
        """
        return self._pooling.encode(prompts, pooling_params, pooling_task, **options)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        /,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What a reward model gives each token of each prompt; otherwise as `embed`."""
        return self._pooling.encode(prompts, pooling_params, "token_classify", **options)

    # -- what needs no prompts

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer()

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: "generate", tasks of PoolingParams, "score"."""
        return self.llm_engine.facts.tasks

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none."""
        return self.llm_engine.get_default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompt beginnings; True if that was done."""
        return self.llm_engine.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """A look at the engine at this moment."""
        return self.llm_engine.stats()

    def get_metrics(self, prefix: str = DEFAULT_METRICS_PREFIX) -> list[Metric]:
        """What the engine has counted since it started: the series of /metrics as Counter, Gauge, Histogram.

        prefix: what their names begin with, 'vllm:' for scripts that look for vLLM's.
        """
        from .observe.metric_values import read_metrics
        from .observe.series import EnginesCollector

        name = self.llm_engine.facts.served_model_name
        metrics = {name: self.llm_engine.metrics_by_engine()}
        return read_metrics(EnginesCollector(metrics, prefix).collect())

    def start_profile(self) -> None:
        """Have the engine note its steps until `stop_profile`; nothing is noted at other times.

        Raises RequestFailedError if somebody profiles the engine already.
        """
        self.llm_engine.start_profile()

    def stop_profile(self) -> Path:
        """Write what was noted to a new file in the folder that profiler_config names, and say which.

        ui.perfetto.dev opens it. Raises RequestFailedError if no profile was started, or the engine was lost
        since.
        """
        return self.llm_engine.stop_profile(self._profile_folder)

    def collective_rpc(self, method: str | Callable[..., Any], *_args: Any, **_options: Any) -> NoReturn:
        """vLLM's way to run code in workers; raises InputError with the reason why there is none."""
        raise InputError("collective_rpc", method, _NO_CODE)

    def apply_model(self, function: Callable[..., Any]) -> NoReturn:
        """As `collective_rpc`."""
        raise InputError("apply_model", function, _NO_CODE)

    # -- the end

    def close(self) -> None:
        """End the engine and its processes within 2 s. Idempotent."""
        self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: Any) -> None:
        self.close()

    def __del__(self) -> None:
        # A constructor that raised has left no engine behind; an interpreter that ends may have no modules.
        with contextlib.suppress(AttributeError, ImportError, TypeError):
            self.close()

    @functools.cached_property
    def _pooling(self) -> PoolingCalls:
        from .vector_calls import PoolingCalls

        return PoolingCalls(self.llm_engine, self._request_numbers)

    def _make_batch(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params, priority: Sequence[int] | None
    ) -> RequestBatch[RequestOutput]:
        """Checked and tokenized; nothing has been handed to the engine."""
        self.llm_engine.check_usable()
        has_many = is_many(prompts)
        many = list(cast(Sequence[Prompt], prompts)) if has_many else [cast(Prompt, prompts)]
        processor = self.llm_engine.input_processor
        params = processor.prepare_each(self._params_of_each(sampling_params, len(many)))
        tokenized = processor.tokenize(many, params, is_many=has_many)
        return RequestBatch[RequestOutput](self.llm_engine, self._make_requests(tokenized, params, priority))

    def _make_requests(
        self, prompts: list[ParsedPrompt], params: list[PreparedParams], priority: Sequence[int] | None
    ) -> list[EngineInput]:
        options = read_priorities(priority, len(prompts))
        ids = [str(next(self._request_numbers)) for _ in prompts]
        make = self.llm_engine.input_processor.make_input
        requests = [make(*parts) for parts in zip(ids, prompts, params, options, strict=True)]
        for request in requests:
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
        return requests

    def _params_of_each(self, params: Params, num_prompts: int) -> list[SamplingParams | PreparedParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, Sequence):
            if len(params) != num_prompts:
                raise InputError(
                    "sampling_params", f"{len(params)} of them", f"one, or {num_prompts}, one a prompt"
                )
            return list(params)
        return [params] * num_prompts


def check_attach_arguments(engine_args: Mapping[str, Any]) -> None:
    """A running engine has been configured: raise ConfigError for arguments that would do so again."""
    for name, value in engine_args.items():
        raise ConfigError(name, value, "not given with attach: the daemon's engine has its own")


def _as_conversations(messages: Any) -> list[Sequence[Message]]:
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], (list, tuple)):
        return list(cast(Sequence[Sequence[Message]], messages))
    return [messages]
