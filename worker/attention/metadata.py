"""What attention needs to know about one step, the same for every layer and every backend.

It knows requests as ranges of tokens and tables of blocks; not ids, not rows, not sampling.
Legend: T tokens, R requests of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# (k, v) of a layer, each [num_blocks, num_kv_heads, block_size, head_size] and contiguous.
KVCache = tuple[Tensor, Tensor]
KVCaches = list[KVCache]


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step's requests on the host, as AttentionMetadata has them."""

    query_starts: NDArray[np.int32]  # [R + 1]
    seq_lens: NDArray[np.int32]  # [R]
    block_tables: NDArray[np.int32]  # [R, max_blocks_used]


@dataclass(frozen=True, slots=True)
class StepStates:
    """Where a step's requests have their recurrent states, of all layers: of layer l a slot's numbers from
    `ModelSpec.state_offsets[l]` on.

    A request's states are read and written in its slot; at position 0 they begin as zeros, and nothing is
    read. After token save_tokens[s] they are written to save_slots[s] too. Tensors are on the model's device,
    host copies beside them. S saves.
    """

    states: Tensor  # float32 [num_slots, slot_numbers]
    slots: Tensor  # int32 [R]
    save_starts: Tensor  # int32 [R + 1]: request r has saves save_starts[r]..save_starts[r + 1]-1
    save_tokens: Tensor  # int32 [S] index among the T tokens of the step, rising
    save_slots: Tensor  # int32 [S]
    slots_host: NDArray[np.int32]
    save_starts_host: NDArray[np.int32]
    save_tokens_host: NDArray[np.int32]
    save_slots_host: NDArray[np.int32]

    @property
    def host_arrays(self) -> tuple[NDArray[np.int32], ...]:
        """The host copies in their order."""
        return self.slots_host, self.save_starts_host, self.save_tokens_host, self.save_slots_host


@dataclass(slots=True)
class AttentionMetadata:
    """The T tokens of one step, grouped into R requests in the order of the token axis, for one KV group.

    Request r owns tokens query_starts[r]..query_starts[r + 1]-1; they are the last of its seq_lens[r]
    tokens, so the first of them stands at position seq_lens[r] - (number of its tokens). Every request has
    at least one token. All tensors are on the model's device and contiguous.

    A captured graph pads a batch of single tokens with requests of one token, any other step with a request
    of all padding tokens and then with requests of none. Their seq_len is 0 and their tokens' slot is -1:
    they read nothing and write nothing to the cache, and attention gives them zeros.
    """

    query_starts: Tensor  # int32 [R + 1]; the last entry is T
    seq_lens: Tensor  # int32 [R] tokens in the cache after this step: context + query
    block_tables: Tensor  # int32 [R, max_blocks_used]; entries past a request's length are unspecified
    # (likewise those of blocks that no token of the step sees through the window of its layers)
    slot_mapping: Tensor  # int64 [T] block_id * block_size + offset: where each token's K and V go
    max_query_len: int
    max_seq_len: int
    # Most requests of one token and of more, where only the device knows which are which; for a graph.
    kind_bounds: tuple[int, int] | None = None
    # Host copies, which spare a device the transfer back; absent, a backend makes them itself.
    query_starts_host: NDArray[np.int32] | None = None
    seq_lens_host: NDArray[np.int32] | None = None
    block_tables_host: NDArray[np.int32] | None = None
    others: tuple[AttentionMetadata, ...] = ()  # of the model's further KV groups
    states: StepStates | None = None  # of a model with recurrent layers, not in `others`

    def for_group(self, group: int) -> AttentionMetadata:
        """What layers of this KV group read; only tables and slots differ."""
        return self if group == 0 else self.others[group - 1]

    @property
    def num_requests(self) -> int:
        """R, those that a graph pads with included."""
        return self.seq_lens.shape[0]

    def to_host_step(self) -> HostStep:
        """The step on the host, from its copies there if it has them."""
        return HostStep(
            *(
                copy if copy is not None else tensor.cpu().numpy()
                for copy, tensor in (
                    (self.query_starts_host, self.query_starts),
                    (self.seq_lens_host, self.seq_lens),
                    (self.block_tables_host, self.block_tables),
                )
            )
        )

    def query_starts_list(self) -> list[int]:
        """First token of each request and T, on the host."""
        source = self.query_starts if self.query_starts_host is None else self.query_starts_host
        return source.tolist()

    def seq_lens_list(self) -> list[int]:
        """Tokens in the cache of each request after this step, on the host."""
        source = self.seq_lens if self.seq_lens_host is None else self.seq_lens_host
        return source.tolist()


def make_metadata(
    tables: Tensor, slots: Tensor, block_tables_host: NDArray[np.int32] | None = None, **step: Any
) -> AttentionMetadata:
    """Of a step with tables [G, R, W] and slots [G, T] of G KV groups; `step`: the other fields."""
    metadata = [
        AttentionMetadata(
            block_tables=tables[group],
            slot_mapping=slots[group],
            block_tables_host=None if block_tables_host is None else block_tables_host[group],
            **step,
        )
        for group in range(len(tables))
    ]
    metadata[0].others = tuple(metadata[1:])
    return metadata[0]
