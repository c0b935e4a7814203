"""Real small tokenizers, and an engine client that answers with scripted tokens instead of a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from array import array
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from quire.frontend import engine_start
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.engine_core_client import EngineCoreClient
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import EngineDeadError
from quire.ipc.protocol.engine_views import SchedulerStats
from quire.ipc.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineFacts,
    FinishReason,
    RequestTimes,
    UtilityMethod,
    UtilityResult,
)
from quire.ipc.protocol.token_ids import decode_token_ids
from quire.ipc.spec.config import EngineConfig
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, this is a small text; it has some words.",
    "once upon a time there was a little fox who lived in the woods",
]


def write_byte_level_folder(folder: Path) -> Path:
    """GPT-2-like: byte-level BPE, a chat token that is special and one added token that is not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(folder, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
    return folder


def write_metaspace_folder(folder: Path) -> Path:
    """Llama-2-like: '▁' for spaces, byte fallback, BOS added by the post-processor."""
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for character in "▁abcdefghijklmnopqrstuvwxyz.,":
        vocab[character] = len(vocab)
    for word in ["▁the", "▁fox", "▁hello", "▁world"]:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return folder


def write_encoder_folder(folder: Path, kind: str = "bert", **config: Any) -> Path:
    """BERT-like (words, types of a pair's texts), or RoBERTa-like (bytes, no types); config.json's values."""
    if kind == "bert":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({w for text in CORPUS for w in text.split()})]
        vocab = {word: number for number, word in enumerate([*words, *(f"##{c}" for c in "abcdefgh")])}
        tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.add_special_tokens(words[:4])
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        tokenizer = Tokenizer.from_file(str(write_byte_level_folder(folder) / "tokenizer.json"))
        tokenizer.add_special_tokens(["<s>", "</s>"])
        ends = [(text, tokenizer.token_to_id(text)) for text in ("</s>", "<s>")]
        tokenizer.post_processor = processors.RobertaProcessing(ends[0], ends[1], add_prefix_space=False)
        names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(folder, **names)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write_config(folder: Path, **values: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **values}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_facts(**changes: Any) -> EngineFacts:
    values: dict[str, Any] = {
        "model": "/nowhere",
        "served_model_name": "fake",
        "tokenizer": "",
        "max_model_len": 64,
        "vocab_size": 500,
        "dtype": "float32",
        "device": "cpu",
        "num_gpu_blocks": 64,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_logprobs": 5,
        "eos_token_ids": (2,),
        "generation_config": "auto",
        "pids": {},
        "started_at": 0.0,
        "startup": [],
        "ledger": [],
        "has_token_types": True,
    }
    values |= changes
    num_tokens = values["num_gpu_blocks"] * values["block_size"]
    return EngineFacts(**({"num_kv_tokens": num_tokens} | values))


def make_stats(**changes: Any) -> SchedulerStats:
    """An engine that has done nothing, but for `changes`."""
    values = dict.fromkeys(SchedulerStats.__struct_fields__, 0) | {"stall": None}
    return SchedulerStats(**(values | changes))


Script = Callable[[EngineCoreRequest], Sequence[int]]


class FakeEngine:
    """What a core would answer: one scripted token a request and turn; ends like a core does."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._live: dict[str, tuple[EngineCoreRequest, list[int], int]] = {}
        self._outputs: list[EngineCoreOutput] = []
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.failing: dict[str, str] = {}  # request id -> cause

    @property
    def is_busy(self) -> bool:
        return bool(self._live)

    def pool(self, request: EngineCoreRequest) -> bytes:
        """Of one vector: the sum of the token ids, their number, and where type 1 begins or -1."""
        ids, params = prompt_ids(request), request.pooling_params
        if params is not None and params.is_token_wise:
            return array("f", [float(number) for one in ids for number in (one, 0.5)]).tobytes()
        start = -1 if request.type_start is None else request.type_start
        return array("f", [sum(ids), len(ids), start]).tobytes()

    def add(self, request: EngineCoreRequest) -> None:
        self.added.append(request)
        self._live[request.request_id] = (request, list(self._script(request)), 0)

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            if request_id in self._live:
                _, _, done = self._live.pop(request_id)
                self._outputs.append(EngineCoreOutput(request_id, done, [], FinishReason.ABORT))

    def turn(self) -> list[EngineCoreOutput]:
        outputs, self._outputs = self._outputs, []
        for request_id in list(self._live):
            outputs.append(self._advance(request_id))
        return outputs

    def _advance(self, request_id: str) -> EngineCoreOutput:
        request, script, done = self._live[request_id]
        if request_id in self.failing:
            del self._live[request_id]
            cause = self.failing[request_id]
            return EngineCoreOutput(request_id, done, [], FinishReason.ERROR, error=cause)
        if request.pooling_params is not None:
            del self._live[request_id]
            return EngineCoreOutput(
                request_id, 0, [], FinishReason.STOP, num_cached_tokens=0, pooled=self.pool(request)
            )
        token = script[done]
        params = request.sampling_params
        finish, stop_reason = None, None
        if token in request.eos_token_ids:
            finish = FinishReason.STOP
        elif token in decode_token_ids(request.token_lists.stop):
            finish, stop_reason = FinishReason.STOP, token
        elif done + 1 in (params.max_tokens, len(script)):
            finish = FinishReason.LENGTH
        if finish is None:
            self._live[request_id] = (request, script, done + 1)
        else:
            del self._live[request_id]
        return EngineCoreOutput(
            request_id,
            done,
            [token],
            finish,
            stop_reason,
            num_cached_tokens=0 if done == 0 else None,
            times=RequestTimes(1.0, 2.0, 3.0, 4.0, 0) if finish is not None else None,
        )


class FakeClient(EngineCoreClient):
    """A client over a FakeEngine, whose turns are taken whenever the frontend waits.

    To be set from any thread: `is_paused` holds back turns, `dead` makes every call raise EngineDeadError,
    `error` is raised by the next wait. After `interrupt_after` turns the main thread gets Ctrl-C, and the
    engine is paused.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, script: Script, **facts: Any) -> None:
        self.facts = make_facts(**({"vocab_size": 2048, "model": str(pocket_folder())} | facts))
        self.startup = []
        self.num_engines = 1
        self.engine = FakeEngine(script)
        self.num_calls = 0
        self.num_closed = 0
        self._news = asyncio.Event()
        self.is_paused = False
        self.dead: str | None = None
        self.error: Exception | None = None
        self.interrupt_after: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("is_paused", "dead", "error") and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    def check_usable(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.check_usable()
        for request in requests:
            self.engine.add(request)
        self._news.set()

    def abort_requests(self, request_ids: list[str]) -> None:
        self.check_usable()
        self.engine.abort(request_ids)
        self._news.set()

    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        assert not tenant
        self.abort_requests(list(names))

    async def get_outputs(self) -> list[EngineCoreOutput]:
        self._loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)
            self._news.clear()
            if self.error is not None:
                raise self.error
            self.check_usable()
            if self.interrupt_after == 0:
                self.interrupt_after, self.is_paused = None, True
                os.kill(os.getpid(), signal.SIGINT)
            if not self.is_paused and (outputs := self.engine.turn()):
                if self.interrupt_after is not None:
                    self.interrupt_after -= 1
                return outputs
            await self._news.wait()

    async def call_each(self, method: UtilityMethod) -> dict[int, UtilityResult]:
        self.check_usable()
        self.num_calls += 1
        return {0: UtilityResult(0, stats=make_stats() if method == UtilityMethod.STATS else None)}

    def close(self) -> None:
        self.num_closed += 1
        self.dead = self.dead or "the engine was closed"


def use_client(monkeypatch: pytest.MonkeyPatch, client: FakeClient) -> None:
    """Have what starts an engine take this one."""

    async def make_client(_config: EngineConfig, _on_phase: Any) -> FakeClient:
        return client

    monkeypatch.setattr(engine_start, "make_async_client", make_client)


@contextlib.contextmanager
def start_async_llm(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, client: FakeClient
) -> Generator[AsyncLLM]:
    """One over this client, of the event loop of tests that are coroutines."""
    use_client(monkeypatch, client)
    llm = AsyncLLM.from_engine_args(EngineArgs())
    runner.run(llm.start())
    yield llm
    llm.shutdown()
    assert client.num_closed > 0


def prompt_ids(request: EngineCoreRequest) -> list[int]:
    return decode_token_ids(request.prompt_token_ids)
