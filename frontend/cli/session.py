"""An engine for as long as one command runs, its own or a daemon's, and answers from it piece by piece."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Self

from ...ipc.errors import RequestFailedError
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.messages import EngineFacts
from ..client.remote_daemon import Attachment
from ..engine_start import read_served_sampling
from ..events import OutputEvent
from ..formats.answer_reader import AnswerReader
from ..llm_engine import LLMEngine
from ..options.engine_args import EngineArgs
from ..outputs import RequestOutput
from ..requests.chat import ChatTurns
from ..requests.input_processor import PreparedParams
from ..requests.prompts import Prompt
from ..text.tokenizer import Tokenizer
from .streams import PhaseLine


def start_engine(engine_args: EngineArgs | None, attach: Attachment | None) -> LLMEngine:
    """Start an engine, or attach to the daemon `attach` where `engine_args` is None.

    Raises ConfigError or ModelError before anything is started, EngineStartError if it fails, DaemonError
    when no such daemon runs.
    """
    if engine_args is None:
        assert attach is not None
        return LLMEngine.attach(attach, client_kind="cli")
    with PhaseLine(f"loading {engine_args.model}") as line:
        return LLMEngine.from_engine_args(engine_args, line.show)


class Session:
    """Starts an engine, or attaches to a daemon's, and closes it when left, whatever happens in between."""

    def __init__(self, engine_args: EngineArgs | None, attach: Attachment | None = None) -> None:
        """As `start_engine`."""
        self._engine = start_engine(engine_args, attach)
        self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._engine.close()

    @property
    def facts(self) -> EngineFacts:
        """The engine's."""
        return self._engine.facts

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's; the commands' engines have one."""
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None, "the commands do not offer skip_tokenizer_init"
        return tokenizer

    @property
    def default_sampling(self) -> dict[str, Any]:
        """What the model recommends in its generation_config.json."""
        return read_served_sampling(self.facts)

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | PreparedParams
    ) -> Generator[tuple[int, RequestOutput]]:
        """(index of the prompt, what is new of its output) as it comes, until all have finished.

        Every prompt is checked before the first is sent. Closing the iterator early aborts what still runs.
        Raises RequestFailedError when the engine failed a request.
        """
        ids = {f"cli-{self._num_requests + index}": index for index in range(len(prompts))}
        self._num_requests += len(prompts)
        try:
            process = self._engine.input_processor.process
            requests = [process(*pair, params) for pair in zip(ids, prompts, strict=True)]
            self._engine.add_inputs(requests)
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.request_id in ids:
                        if output.error is not None:
                            raise RequestFailedError(output.error, output.error_code)
                        yield ids[output.request_id], output
        finally:
            self._engine.forget_requests(ids)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, is_thinking: bool | None = None
    ) -> Generator[tuple[RequestOutput, list[OutputEvent]]]:
        """As `stream` for the next message of one conversation: what is new of it, and the events in that.

        Raises PromptError for what the chat template refuses.
        """
        known = self._engine.input_processor.output_format
        turns = ChatTurns(self.tokenizer, known, None, None, True, self.facts.eos_token_ids)
        params.skip_special_tokens = turns.parsing is None
        prompt: Prompt = {"prompt_token_ids": self.render_chat(messages, is_thinking)}
        processor = self._engine.input_processor
        tokenized = processor.tokenize([prompt])
        (prepared,) = turns.prepare(processor, processor.prepare_each([params]), tokenized)
        reader = AnswerReader(turns.parsing)
        for _, output in self.stream([prompt], prepared):
            yield output, [event for events in reader.read(output) for event in events]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], is_thinking: bool | None = None
    ) -> list[int]:
        """The prompt of a conversation, by the model's chat template. Raises PromptError."""
        variables = None if is_thinking is None else {"enable_thinking": is_thinking}
        text = self.tokenizer.find_chat_template().render(messages, variables=variables)
        return self.tokenizer.encode(text, add_special_tokens=False)
