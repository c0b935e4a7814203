"""Drives a GPUModelRunner by hand: a toy model whose logits depend on every earlier token, a small scheduler.

The model reads a request's tokens back from the KV cache through its block table, so a token in a wrong
slot, a wrong position or a foreign block changes all logits after it. Its arithmetic is exact: chunks,
batches and order cannot change a bit, and tests compare with equality.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from fakes import make_config
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.step import (
    GroupBlocks,
    ModelRunnerOutput,
    NewRequestData,
    RowLogprobs,
    SchedulerOutput,
)
from quire.ipc.protocol.token_ids import encode_token_ids
from quire.ipc.protocol.token_lists import drop_packed, pack_token_lists
from quire.ipc.spec.config import EngineConfig, SchedulerConfig
from quire.ipc.spec.model_spec import RopeConfig
from quire.worker.attention.metadata import AttentionMetadata, KVCaches
from quire.worker.layers.embedding import StageInput
from quire.worker.steps.model_runner import GPUModelRunner, LaunchedStep
from torch import Tensor

MODULUS = 1_000_003


class ToyModel:
    """Logits are a hash of (all tokens up to a position, token): 8 wide, spread evenly."""

    weight_bytes = 0
    native = None
    pooling_head = None
    embedding = StageInput(torch.empty(0, 1))

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.calls: list[tuple[list[int], list[int]]] = []  # (input ids, positions) of each step
        self.rope_lengths: list[list[int]] = []
        self.bad_tokens: set[int] = set()  # after one of these the logits are NaN

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: KVCaches,
        metadata: AttentionMetadata,
        rope_lengths: Tensor | None = None,
        token_types: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        self.calls.append((input_ids.tolist(), positions.tolist()))
        if rope_lengths is not None:
            self.rope_lengths.append(rope_lengths.tolist())
        cache = kv_caches[0][0]  # [blocks, 1, block_size, 1]
        block_size = cache.shape[2]
        slots = metadata.slot_mapping
        cache[slots // block_size, 0, slots % block_size, 0] = input_ids.float()
        starts, lengths = metadata.query_starts.tolist(), metadata.seq_lens.tolist()
        hashes: list[int] = []
        for request, length in enumerate(lengths):
            table = metadata.block_tables[request].long()
            tokens: list[int] = cache[table, 0, :, 0].flatten()[:length].long().tolist()
            num_queries = starts[request + 1] - starts[request]
            assert positions[starts[request] : starts[request + 1]].tolist() == list(
                range(length - num_queries, length)
            )
            hashes += prefix_hashes(tokens)[-num_queries:]
        is_bad = torch.tensor([token in self.bad_tokens for token in input_ids.tolist()])
        hidden = torch.tensor(hashes, dtype=torch.float64)[:, None]
        return torch.where(is_bad[:, None], torch.nan, hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        ids = torch.arange(1, self._vocab_size + 1, dtype=torch.int64)
        mixed = (hidden.nan_to_num().long() * 7919 + ids * ids * 104_729 + ids * 31) % MODULUS
        mixed = mixed * mixed % MODULUS
        logits = mixed.float() * (8.0 / MODULUS) - 4.0
        return torch.where(hidden.isnan(), torch.nan, logits)


def prefix_hashes(tokens: list[int]) -> list[int]:
    """What the toy model knows of a sequence after each of its tokens."""
    state, hashes = 17, []
    for token in tokens:
        state = (state * 31_337 + token + 1) % MODULUS
        hashes.append(state)
    return hashes


def toy_config(*, max_model_len: int = 64, rope: RopeConfig | None = None) -> EngineConfig:
    """What a ToyModel fits."""
    return make_config(
        vocab_size=61,
        head_size=1,
        max_model_len=max_model_len,
        rope=rope,
        scheduler=SchedulerConfig(max_num_seqs=8),
    )


@dataclass
class DrivenRequest:
    """What a scheduler knows of a request: counts, not tokens that are still on the device."""

    row: int
    num_known: int
    num_computed: int
    num_blocks: int = 0
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[RowLogprobs] = field(default_factory=list[RowLogprobs])


class Driver:
    """Enters requests by name and steps them, on blocks in random order."""

    def __init__(
        self, config: EngineConfig | None = None, is_async: bool | None = None, num_blocks: int = 96
    ) -> None:
        self.config = config or toy_config()
        self.model = ToyModel(self.config.model.spec.vocab_size)
        self._block_size = self.config.cache.block_size
        # NaN where nothing was written: reading it would show in every hash.
        cache = torch.full((num_blocks, 1, self._block_size, 1), torch.nan)
        self.runner = GPUModelRunner(
            self.config, self.model, [(cache, cache.clone())], torch.device("cpu"), is_async
        )
        self._free_blocks = list(range(num_blocks))
        random.Random(0).shuffle(self._free_blocks)
        self.requests: dict[str, DrivenRequest] = {}
        self._names: dict[int, str] = {}
        self._entering: list[NewRequestData] = []
        self._freed: list[int] = []
        self._num_steps = 0
        self.bad_rows: list[int] = []
        self.failed_rows: list[int] = []

    def enter(
        self,
        name: str,
        row: int,
        prompt: list[int],
        params: SamplingParams | None = None,
        output: list[int] | None = None,
        eos: list[int] | None = None,
        bad_words: list[list[int]] | None = None,
        grammar: str = "",
    ) -> None:
        """The request enters `row` with the next step that computes it."""
        output = output or []
        params = params.clone() if params is not None else SamplingParams(temperature=0.0)
        lists = pack_token_lists(params, bad_words or [], self.config.model.spec.vocab_size)
        drop_packed(params)
        self.requests[name] = DrivenRequest(row, len(prompt) + len(output), 0)
        self._names[row] = name
        self._entering.append(
            NewRequestData(
                row=row,
                request_id=name,
                prompt_token_ids=encode_token_ids(prompt),
                output_token_ids=encode_token_ids(output),
                sampling_params=params,
                eos_token_ids=eos or [],
                token_lists=lists,
                blocks=[GroupBlocks([])],
                num_computed_tokens=0,
                grammar=grammar,
            )
        )

    def free(self, name: str) -> None:
        """The row is freed by the next step; the blocks stay taken."""
        self._freed.append(self.requests.pop(name).row)

    def launch(self, num_tokens: dict[str, int]) -> LaunchedStep:
        """Launch a step that computes so many tokens of each named request."""
        sampled_rows: list[int] = []
        for name, count in num_tokens.items():
            request = self.requests[name]
            request.num_computed += count
            if request.num_computed == request.num_known:
                request.num_known += 1
                sampled_rows.append(request.row)
        step = SchedulerOutput(
            step_id=self._num_steps,
            rows=[self.requests[name].row for name in num_tokens],
            num_tokens=list(num_tokens.values()),
            new_requests=self._entering,
            freed_rows=self._freed,
            new_block_ids=[
                (request.row, 0, self._grow(request))
                for request in map(self.requests.__getitem__, num_tokens)
            ],
            sampled_rows=sampled_rows,
        )
        self._num_steps += 1
        self._entering, self._freed = [], []
        return self.runner.launch(step)

    def collect(self, launched: LaunchedStep) -> ModelRunnerOutput:
        """Take a step's tokens; those of freed requests are dropped, as a scheduler does."""
        output = self.runner.collect(launched)
        for row, token in zip(output.rows, output.token_ids, strict=True):
            if self._names[row] in self.requests:
                self.requests[self._names[row]].tokens.append(token)
        for logprobs in output.logprobs:
            self.requests[self._names[logprobs.row]].logprobs.append(logprobs)
        self.bad_rows += output.bad_rows
        self.failed_rows += [failure.row for failure in output.failed_rows]
        return output

    def step(self, num_tokens: dict[str, int]) -> ModelRunnerOutput:
        """Launch and collect."""
        return self.collect(self.launch(num_tokens))

    def run(self, num_outputs: int, chunk: int = 1000) -> dict[str, list[int]]:
        """Step all requests, `chunk` tokens of each at most, until each has so many new tokens."""
        while True:
            unfinished = {n: r for n, r in self.requests.items() if len(r.tokens) < num_outputs}
            if not unfinished:
                return {name: request.tokens for name, request in self.requests.items()}
            self.step({n: min(chunk, r.num_known - r.num_computed) for n, r in unfinished.items()})

    def _grow(self, request: DrivenRequest) -> list[int]:
        needed = -(-request.num_computed // self._block_size) - request.num_blocks
        request.num_blocks += max(0, needed)
        return [self._free_blocks.pop() for _ in range(needed)]


def make_prompt(length: int, seed: int = 0, vocab_size: int = 61) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()
